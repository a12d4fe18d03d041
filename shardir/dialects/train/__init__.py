"""The `train` dialect: requests for steps and gradients, initial values and updates of parameters.

    func.func @loss(%x: tensor<8x4xf32> {train.input = #train.init<normal, mean = 0.0, std = 1.0>},
                    %w: tensor<4x2xf32> {train.parameter = "w", train.init = #train.init<...>})
        -> tensor<f32> { ... }
    train.step @step of @loss <momentum, lr = 0.1, momentum = 0.9>

`distributed-autodiff` turns a `train.step` into a function from inputs, parameters and states to
the loss and the updated parameters and states.

    options.py             attributes
    requests.py            requests and marks
    loops.py               loops; microbatches.py over microbatches, repeats.py over equal blocks
    roles.py               roles of arguments and results
    updates.py             bases of updates, and the scalars of a step
    optimizer.py           common parts of optimizers; optimizers/ has a file for each
    stages.py, stage_*.py  pipelined steps
    synchronization.py     replicas
"""

from xdsl.ir import Dialect

from shardir.dialects.nn.base import TensorOp
from shardir.dialects.train.loops import (
    AfterLoop,
    CarriedOp,
    CarryOp,
    EndLoop,
    Loop,
    available_after,
    loop_of,
)
from shardir.dialects.train.microbatches import (
    AccumulateOp,
    CollectOp,
    EndMicrobatchesOp,
    MicrobatchesOp,
    MicrobatchOp,
    OfMicrobatches,
)
from shardir.dialects.train.optimizer import (
    RULES,
    FirstValue,
    Optimizer,
    ParameterStep,
    StepScalars,
    Updated,
    sum_of_squares,
)
from shardir.dialects.train.optimizers import OPTIMIZERS, UPDATES, OptimizerAttr
from shardir.dialects.train.optimizers.adagrad import AdagradOp
from shardir.dialects.train.optimizers.adam import AdamOp
from shardir.dialects.train.optimizers.adamax import AdamaxOp
from shardir.dialects.train.optimizers.adamw import AdamWOp
from shardir.dialects.train.optimizers.lamb import LambDirectionOp
from shardir.dialects.train.optimizers.lars import LarsOp
from shardir.dialects.train.optimizers.momentum import MomentumOp
from shardir.dialects.train.optimizers.nadam import NAdamOp, NAdamWOp
from shardir.dialects.train.optimizers.nesterov import NesterovOp
from shardir.dialects.train.optimizers.rmsprop import CenteredRmsDirectionOp, RmsDirectionOp
from shardir.dialects.train.options import (
    ATTRS,
    AccumulateAttr,
    AverageAttr,
    ClipAttr,
    InitAttr,
    LossScaleAttr,
    MetricsAttr,
    ScheduleAttr,
    points_of,
)
from shardir.dialects.train.repeats import EndRepeatOp, ItemOp, ItemsOp, RepeatOp
from shardir.dialects.train.requests import (
    EMA,
    SUM,
    BackwardOp,
    ForwardOp,
    GradientOp,
    Mark,
    Request,
    StateKeys,
    StepOp,
    UpdateOp,
)
from shardir.dialects.train.role_checks import check_initial_values
from shardir.dialects.train.roles import (
    LR_SCALE,
    OWN_LR,
    RULE,
    SCALAR,
    STATE_LAYOUT,
    STATES,
    UPDATE,
    UPDATE_OF,
    WEIGHS,
    WEIGHT_DECAY,
    Argument,
    Role,
    arg_attrs,
    arguments,
    gradient_arguments,
    gradient_attrs,
    is_step,
    mark_step,
    metric_attrs,
    metric_names,
    of_microbatches,
    remove_annotations,
    result_attrs,
    result_batches,
    set_arg_attrs,
    set_result_attrs,
    state_attrs,
    text_attr,
    updated_arguments,
    updated_keys,
    updates_attrs,
    weighed_by,
    weighing_attrs,
)
from shardir.dialects.train.rules import (
    ELEMENTWISE,
    WHOLE,
    acts_on_elements,
    check_rule,
    first_on_whole,
    is_rule,
    not_elementwise,
)
from shardir.dialects.train.stage_order import Event, StageMessage, StageOrder, StepValue
from shardir.dialects.train.stage_proof import check_order, proven_order
from shardir.dialects.train.stage_runs import Read, StageRun, StepRuns
from shardir.dialects.train.stages import (
    PIPELINE,
    SCHEDULE,
    SEARCH,
    STAGE,
    STAGE_AXIS,
    EitherOp,
    PipelineAttr,
    TransferOp,
    action_attrs,
    action_of,
    callee_of,
    check_stages,
    pipeline_of,
    schedule_of,
    set_schedule,
    stage_attrs,
    stage_in,
    stage_of,
)
from shardir.dialects.train.synchronization import (
    EVERY,
    REPLICA,
    REPLICAS,
    SYNC,
    SyncAttr,
    check_counts,
    every_of,
    is_of_replica,
    key_of_replica,
    replicas_of,
    set_count,
    sync_of,
)
from shardir.dialects.train.updates import (
    SCALARS,
    SHARED_SCALAR,
    Adams,
    BiasCorrectionOp,
    LearningRateOp,
    NextLossScaleOp,
    Scalar,
    SgdOp,
    TrustRatioOp,
    Update,
    WithVelocity,
)

MARKS: list[type[Mark]] = [
    BackwardOp, MicrobatchesOp, EndMicrobatchesOp, RepeatOp, EndRepeatOp, UpdateOp,
]  # fmt: skip
LOOP: list[type[TensorOp]] = [
    MicrobatchOp, AccumulateOp, CollectOp, CarriedOp, CarryOp, ItemOp, ItemsOp,
]  # fmt: skip
"""The ops on the values that enter and leave loops."""

Train = Dialect(
    "train",
    [StepOp, GradientOp, ForwardOp, *MARKS, *LOOP, TransferOp, EitherOp, *UPDATES, *SCALARS],
    [*ATTRS, OptimizerAttr, SyncAttr, PipelineAttr],
)

__all__ = [
    "ATTRS",
    "ELEMENTWISE",
    "EMA",
    "EVERY",
    "LOOP",
    "LR_SCALE",
    "MARKS",
    "OPTIMIZERS",
    "OWN_LR",
    "PIPELINE",
    "REPLICA",
    "REPLICAS",
    "RULE",
    "RULES",
    "SCALAR",
    "SCALARS",
    "SCHEDULE",
    "SEARCH",
    "SHARED_SCALAR",
    "STAGE",
    "STAGE_AXIS",
    "STATES",
    "STATE_LAYOUT",
    "SUM",
    "SYNC",
    "UPDATE",
    "UPDATES",
    "UPDATE_OF",
    "WEIGHS",
    "WEIGHT_DECAY",
    "WHOLE",
    "AccumulateAttr",
    "AccumulateOp",
    "AdagradOp",
    "AdamOp",
    "AdamWOp",
    "AdamaxOp",
    "Adams",
    "AfterLoop",
    "Argument",
    "AverageAttr",
    "BackwardOp",
    "BiasCorrectionOp",
    "CarriedOp",
    "CarryOp",
    "CenteredRmsDirectionOp",
    "ClipAttr",
    "CollectOp",
    "EitherOp",
    "EndLoop",
    "EndMicrobatchesOp",
    "EndRepeatOp",
    "Event",
    "FirstValue",
    "ForwardOp",
    "GradientOp",
    "InitAttr",
    "ItemOp",
    "ItemsOp",
    "LambDirectionOp",
    "LarsOp",
    "LearningRateOp",
    "Loop",
    "LossScaleAttr",
    "Mark",
    "MetricsAttr",
    "MicrobatchOp",
    "MicrobatchesOp",
    "MomentumOp",
    "NAdamOp",
    "NAdamWOp",
    "NesterovOp",
    "NextLossScaleOp",
    "OfMicrobatches",
    "Optimizer",
    "OptimizerAttr",
    "ParameterStep",
    "PipelineAttr",
    "Read",
    "RepeatOp",
    "Request",
    "RmsDirectionOp",
    "Role",
    "Scalar",
    "ScheduleAttr",
    "SgdOp",
    "StageMessage",
    "StageOrder",
    "StageRun",
    "StateKeys",
    "StepOp",
    "StepRuns",
    "StepScalars",
    "StepValue",
    "SyncAttr",
    "Train",
    "TransferOp",
    "TrustRatioOp",
    "Update",
    "UpdateOp",
    "Updated",
    "WithVelocity",
    "action_attrs",
    "action_of",
    "acts_on_elements",
    "arg_attrs",
    "arguments",
    "available_after",
    "callee_of",
    "check_counts",
    "check_initial_values",
    "check_order",
    "check_rule",
    "check_stages",
    "every_of",
    "first_on_whole",
    "gradient_arguments",
    "gradient_attrs",
    "is_of_replica",
    "is_rule",
    "is_step",
    "key_of_replica",
    "loop_of",
    "mark_step",
    "metric_attrs",
    "metric_names",
    "not_elementwise",
    "of_microbatches",
    "pipeline_of",
    "points_of",
    "proven_order",
    "remove_annotations",
    "replicas_of",
    "result_attrs",
    "result_batches",
    "schedule_of",
    "set_arg_attrs",
    "set_count",
    "set_result_attrs",
    "set_schedule",
    "stage_attrs",
    "stage_in",
    "stage_of",
    "state_attrs",
    "sum_of_squares",
    "sync_of",
    "text_attr",
    "updated_arguments",
    "updated_keys",
    "updates_attrs",
    "weighed_by",
    "weighing_attrs",
]  # fmt: skip
