"""Programs on the ranks of this machine: runs, the comparison with one device, measurements."""

from shardir.backend.torch.launch.export import export
from shardir.backend.torch.launch.measure import times
from shardir.backend.torch.launch.ranks import Ranks
from shardir.backend.torch.launch.report import Progress, run_and_check, summary
from shardir.backend.torch.launch.start import read_plan, run

__all__ = ["Progress", "Ranks", "export", "read_plan", "run", "run_and_check", "summary", "times"]
