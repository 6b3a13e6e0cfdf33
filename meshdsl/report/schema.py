"""The fields of reports, in the JSON that users read.

A field that is not always there is in a class of its own, with the fields that are there with it.
Bytes, FLOPs and seconds are those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NotRequired, TypedDict, TypeVar, final

from meshdsl.carets import DiagnosticFacts, FixFacts

Saves = dict[str, float]
"""What a rule saves: bytes sent, bytes held, FLOPs, seconds."""

# --- explain -------------------------------------------------------------------------------------


class RuleFacts(TypedDict):
    """A rule that splits a dim, and where it is written."""

    rule: str
    file: NotRequired[str]
    line: NotRequired[int]


LoopFacts = TypedDict(
    "LoopFacts", {"as": str, "line": int, "trips": int, "bytes": NotRequired[int]}
)
"""What a tensor is to a `repeat`: `carried`, `slice`, `result`, `stacked` or `kept`."""


class StageLocal(TypedDict):
    """A tensor that is stored on one stage only."""

    local_shapes: list[list[int]]
    placement: dict[str, str]
    on: dict[str, int]


@final
class TensorFacts(TypedDict):
    """A tensor of a program. In a comparison also as the language writes it, and by positions."""

    name: str | None
    id: int
    file: str
    line: int
    dtype: str
    dims: list[str]
    declared: list[str]
    shape: list[int]
    local_shape: list[int]
    local_shapes: NotRequired[list[list[int]]]
    placement: dict[str, str]
    order: dict[str, list[str]]
    blocks: NotRequired[dict[str, list[list[int]]]]
    role: str
    rules: dict[str, RuleFacts]
    on: NotRequired[dict[str, int]]
    loop: LoopFacts | None
    between: bool
    named: NotRequired[str]
    sbp: NotRequired[dict[str, str]]


_Way = TypedDict("_Way", {"from": str, "to": str})


class MovedFacts(_Way):
    """A tensor in a collective, and its placements before and after.

    `why` begins with the `cause`; who needs it follows, and what the cheapest alternative sends.
    `remedies` are in words, the best first: edits of the layout by one rule that were compiled.
    `remedy` is the first of them, empty without one.
    """

    tensor: str
    file: str
    line: int
    phase: str
    payload_bytes: int
    wire_bytes: int
    cause: str
    why: str
    remedy: str
    remedies: list[str]


@final
class CollectiveFacts(MovedFacts):
    """An executed collective; the tensors of a bucket are in `parts`.

    Where rows are sent by number, `wire_bytes` are the most that a device sends if there are no
    more rows than `rows=` promises, `balanced_bytes` what each sends where all groups have as many.
    """

    kind: str
    op: str | None
    axes: list[str]
    group_size: int
    count: int
    overlapped: bool
    trip_bytes: int
    cluster_wire_bytes: int
    formula: str
    uneven: NotRequired[bool]
    balanced_bytes: NotRequired[int]
    on: NotRequired[dict[str, int]]
    parts: list[MovedFacts]
    seconds: NotRequired[float]


class TotalsFacts(TypedDict):
    """Sums of one device, of that which sends most."""

    wire_bytes: int
    cluster_wire_bytes: int
    collectives: int
    by_kind: dict[str, int]
    by_axis: dict[str, int]
    by_phase: dict[str, int]
    flops_per_device: int


class RemedyFacts(TypedDict):
    """A change of a layout by one rule that was compiled, with what it saves per device.

    `summary` is all of it in words. `holds_bytes` is the change of the peak of memory, `computes`
    the quotient of FLOPs after and before. `fixes` has the edit; it is empty where the layout is
    not written as text.
    """

    title: str
    summary: str
    layout: str
    saves_bytes: int
    holds_bytes: int
    computes: float
    fixes: list[FixFacts]


class PlanFacts(TypedDict):
    """What the plan of the policy `optimal` minimises, and how far it was searched.

    `claim` says in words what is proven of it.
    """

    claim: str

    message_bytes: int
    searched: str
    least: bool
    objective: NotRequired[str]


class TransferFacts(TypedDict):
    """What is moved between the memory of a device and another, so often in a step."""

    kind: str
    tensor: str
    file: str
    line: int
    phase: str
    count: int
    bytes: int
    overlapped: bool


class OffloadedFacts(TypedDict):
    """What is stored in another memory, also of which kind; bytes read and written in a step.

    Updates do so in chunks; `transfers` are all others.
    """

    bytes: int
    params: int
    activations: int
    read: int
    written: int
    chunk: int
    transfers: list[TransferFacts]


class WarningFacts(TypedDict):
    """A warning."""

    code: str
    message: str
    line: int | None


class StageFacts(TypedDict, total=False):
    """The stage that is simulated, its idle seconds, and seconds of each stage's passes.

    `bubble` is the share of all stages' time between the first pass and the last that is idle. The
    stage that `ends_last` ends the step.
    """

    stage: int
    ends_last: bool
    idle: float
    bubble: float
    passes: dict[str, list[float]]


class LineTime(TypedDict):
    """Seconds of a source line, and what bounds the most of them."""

    file: str
    line: int
    compute: float
    communication: float
    bound: str


class TimeFacts(StageFacts):
    """Predicted seconds of a step, and the bytes of memory that a device of the cluster has."""

    cluster: str
    device_memory: float
    seconds: float
    compute: float
    waiting: float
    exposed: dict[str, float]
    sending: dict[str, float]
    by_bound: dict[str, float]
    lines: list[LineTime]


class UpdateFacts(TypedDict, total=False):
    """Asynchronous updates: the versions of parameters that passes read, their age and copies."""

    weights: str
    updates_behind: list[int]
    copies: list[int]


class DividedFacts(TypedDict, total=False):
    """Iterations of each stage, sizes of micro-batches, stages of each device, recomputation."""

    layers: list[int]
    slices: list[int]
    held: list[list[int]]
    recompute: str


class PipelineFacts(DividedFacts, UpdateFacts):
    """A pipeline: its table, what is idle, and what each stage holds."""

    axis: str
    schedule: str
    stages: int
    micro_batches: int
    rows: list[str] | None
    early: list[str]
    bubble: str
    in_flight: list[int]
    peak: list[int]


class WarmupFacts(TypedDict):
    """The first steps of a training, which compress nothing: what each sends, and its peak."""

    steps: int
    collectives: int
    wire_bytes: int
    peak: int


class CompressionFacts(TypedDict, total=False):
    """The compression as written, and how many workers compress for themselves."""

    compress: str
    workers: int
    warmup: WarmupFacts


class FrozenFacts(TypedDict):
    """The frozen parameters, and the bytes of them on the device that has most."""

    params: list[str]
    bytes: int


class TrainedFacts(TypedDict, total=False):
    """Which parameters of a training step it does not train."""

    frozen: FrozenFacts


class OffloadFacts(TypedDict, total=False):
    """What is on disk, or in the memory of the host."""

    disk: OffloadedFacts
    host: OffloadedFacts


class PipedFacts(TypedDict, total=False):
    """The pipeline of a program that is one."""

    pipeline: PipelineFacts


class TimedFacts(TypedDict, total=False):
    """Predicted times, where a cluster is named."""

    time: TimeFacts


class BoundedFacts(TypedDict, total=False):
    """Limits of the search for routes: a cheaper route may exist."""

    bounded: str


class ReportFacts(
    CompressionFacts, TrainedFacts, OffloadFacts, PipedFacts, TimedFacts, BoundedFacts
):
    """`explain`: a program under a layout."""

    version: int
    program: str
    file: str
    mesh: dict[str, int]
    devices: int
    layout: str
    reduce: str
    proven: bool | None
    plan: PlanFacts | None
    tensors: list[TensorFacts]
    collectives: list[CollectiveFacts]
    totals: TotalsFacts
    memory: dict[str, int]
    warnings: list[WarningFacts]
    remedies: list[RemedyFacts]


# --- compare -------------------------------------------------------------------------------------


class PlacementFacts(TypedDict):
    """A placement as the language writes it, and the data for a picture of it."""

    named: str
    order: dict[str, list[str]]
    partial: list[str]
    op: str | None
    local_shape: list[int]


class StepFacts(TypedDict):
    """A step of a reshard."""

    kind: str
    op: str | None
    axes: list[str]
    dim: str | None
    to_dim: str | None
    before: PlacementFacts
    after: PlacementFacts
    payload_bytes: int
    wire_bytes: int


class RouteFacts(_Way):
    """A reshard in its steps."""

    tensor: str
    named: bool
    file: str
    line: int
    phase: str
    count: int
    dims: list[str]
    shape: list[int]
    steps: list[StepFacts]
    wire_bytes: int
    why: str


Cell = TypeVar("Cell", TensorFacts, RouteFacts)


class Cells(TypedDict, Generic[Cell]):
    """A tensor, or a reshard, in all columns; None where a column has none."""

    tensor: str
    same: bool
    differs: list[bool]
    cells: Sequence[Cell | None]


class RowFacts(TypedDict):
    """A source line in all columns."""

    file: str
    line: int
    text: str
    same: bool
    tensors: list[Cells[TensorFacts]]
    routes: list[Cells[RouteFacts]]
    wire_bytes: list[int | None]


class AnnotationFacts(TypedDict):
    """The number of annotations: by name `rules` and `pins`, by position `signatures`."""

    rules: int
    pins: int
    signatures: int


class ColumnHead(TypedDict):
    """The letter and title of a column."""

    letter: str
    title: str
    kind: str
    positional: bool
    same_as: str | None


@final
class BrokenColumn(ColumnHead):
    """A column that could not be compiled."""

    version: int
    layout: str | None
    reduce: str
    diagnostics: list[DiagnosticFacts]


@final
class CompiledColumn(ReportFacts, ColumnHead):
    """A column, with the report of its program."""

    annotations: AnnotationFacts
    routes: list[RouteFacts]


ColumnFacts = CompiledColumn | BrokenColumn


class DistanceFacts(TypedDict):
    """The worst output of a run, against the reference or another run."""

    output: str
    role: str
    measure: str
    max_error: float | None
    relative: float | None
    tolerance: float
    ok: bool


class PairFacts(DistanceFacts):
    """Two columns that ran."""

    columns: list[str]


class RanFacts(TypedDict):
    """The run of a column: `ran`, `same`, `refused`, `failed` or `broken`."""

    column: str
    status: str
    same_as: NotRequired[str]
    diagnostics: NotRequired[list[DiagnosticFacts]]
    seconds: NotRequired[float]
    wire_bytes: NotRequired[int]
    reference: NotRequired[DistanceFacts]


class RunFacts(TypedDict):
    """The runs of all columns."""

    executed: list[str]
    seed: int | None
    engine: str | None
    runs: list[RanFacts]
    between: list[PairFacts]


class TableFacts(TypedDict):
    """A comparison before anything has run."""

    version: int
    program: str
    file: str
    same: bool
    columns: list[ColumnFacts]
    rows: list[RowFacts]


class ComparisonFacts(TableFacts):
    """`compare`: columns side by side, and their runs."""

    run: RunFacts


# --- run -----------------------------------------------------------------------------------------


class SentFacts(TypedDict):
    """What a device sent."""

    collectives: int
    wire_bytes: int


class ValueFacts(TypedDict):
    """An output, or an updated parameter or state with its `role`, and how it compares."""

    name: str
    dims: list[str]
    shape: list[int]
    local_shape: list[int]
    role: NotRequired[str]
    max_error: NotRequired[float]
    relative: NotRequired[float]
    ok: NotRequired[bool]


class RanProgram(TypedDict):
    """`run`: devices, outputs and updates, without values."""

    version: int
    engine: str
    seconds: float
    devices: list[SentFacts]
    outputs: list[ValueFacts]
    updated: list[ValueFacts]


# --- simulate ------------------------------------------------------------------------------------


class LineSeconds(TypedDict):
    """What a source line takes of the compute stream."""

    file: str
    line: int
    seconds: float
    waiting: float
    flops: int
    bound: str


class PeakFacts(TypedDict):
    """The most memory of a device, when, and how much there is."""

    bytes: int
    seconds: float
    limit: float


class SimulationFacts(StageFacts):
    """`simulate`: a step in time."""

    version: int
    program: str
    file: str
    mesh: dict[str, int]
    devices: int
    layout: str
    cluster: str
    seconds: float
    compute: float
    exposed: dict[str, float]
    sending: dict[str, float]
    mfu: float
    hfu: float
    model_flops: int
    peak: PeakFacts
    lines: list[LineSeconds]


# --- rows ----------------------------------------------------------------------------------------


class TypeFacts(TypedDict):
    """The type of an operand or a result."""

    dtype: str
    dims: list[str]


class ShardingRow(TypedDict):
    """A legal placement of operands and results along one mesh axis, and what it follows from."""

    ins: list[str]
    outs: list[str]
    because: str


class CallFacts(TypedDict):
    """A call of an operator, and its rows."""

    ins: list[TypeFacts]
    outs: list[TypeFacts]
    attrs: dict[str, str]
    rows: list[ShardingRow]
    whole: list[str]


class OperatorFacts(TypedDict):
    """`rows`: an operator."""

    version: int
    operator: str
    composite: bool
    multi_axis_condition: bool
    calls: list[CallFacts]
    hold_but_are_not_used: NotRequired[dict[str, str]]


class OperatorMeanings(TypedDict):
    """`rows` without an operator: what each computes, by name."""

    version: int
    operators: dict[str, str]


# --- search --------------------------------------------------------------------------------------


class SavingRule(TypedDict):
    """A rule of a layout that was searched for, and what it saves."""

    selector: str
    dim: str
    axes: list[str]
    saves: Saves


class SearchedPlan(TypedDict):
    """A plan that a search placed."""

    rules: list[SavingRule]
    cuts: list[str]
    settings: list[str]
    schedule: str | None
    reduce: str
    step_seconds: float | None
    wire_bytes: int
    memory: dict[str, int]
    flops_per_device: int


class ChangeFacts(TypedDict):
    """A change to the layout that a search began from."""

    before: str | None
    after: str | None
    saves: Saves


class StartFacts(SearchedPlan):
    """The layout that a search began from."""

    changes: list[ChangeFacts]


class MeshFacts(TypedDict):
    """The best plan on another mesh of as many devices."""

    mesh: dict[str, int]
    best: SearchedPlan | None
    bound: dict[str, float]
    proven: bool


class SpaceFacts(TypedDict):
    """How many layouts there are, and what was done with them."""

    level: str
    valid: int
    evaluated: int
    bounded: int
    symmetry: int
    steps: int
    pipelines: int


class BudgetFacts(TypedDict):
    """The operators that a search might place, and whether these were too few to try all."""

    operators: int
    is_over: bool


class _Searched(TypedDict):
    version: int
    program: str
    file: str
    mesh: dict[str, int]
    cluster: str | None
    objective: str
    memory_limit: int | None
    method: str
    space: SpaceFacts
    plans: list[SearchedPlan]
    bound: dict[str, float]
    proven: bool
    front: NotRequired[list[SearchedPlan]]
    meshes: NotRequired[list[MeshFacts]]
    certificate: NotRequired[dict[str, str | float]]
    budget: NotRequired[BudgetFacts]


_From = TypedDict("_From", {"from": StartFacts}, total=False)


class SearchFacts(_Searched, _From):
    """`search`: plans, the best first."""
