"""The Python interface: parse, compile, save, run.

    import shardir

    compiled = shardir.compile_file("mlp.ir")     # or compile(text), or compile(module)
    print(compiled.text)                          # the IR after all passes
    print(compiled.program)                       # the Python that every rank runs
    compiled.save("out")                          # torchrun --nproc-per-node 4 out/program.py
    report = compiled.run(steps=100)              # or run it now on local processes

    program = shardir.compile(model, inputs, optimizer="adamw, lr = 1e-3", mesh="dp = 2")

An error in a program is a ShardirError with source locations.
"""
