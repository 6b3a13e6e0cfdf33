# Types of the operators for type checkers, generated from the registry (signatures.py):
# MESHDSL_UPDATE_GOLDEN=1 pytest tests/api/test_operators.py
from collections.abc import Sequence
from typing import Any, Protocol

from meshdsl.api.dims import Arrow, By, Dim, DType
from meshdsl.api.tensor import Operand, Tensor
from meshdsl.api.tracer import Form

_Item = Dim | By | Arrow
_Dims = _Item | tuple[_Item, ...]

class _Initialiser(Protocol):
    def __call__(self, *numbers: float) -> Form: ...

class _Optimizer(Protocol):
    def __call__(self, *args: float | str | Form, **options: float | str | Form) -> Form: ...

class _Abs(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Add(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _AllApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _All(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _AllApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _AnyApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Any(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _AnyApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _ArgmaxApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Argmax(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _ArgmaxApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _AttentionApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, z: Operand, u: Operand = ..., /, scale: float | Any = ...) -> Tensor: ...

class _Attention(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _AttentionApplied: ...

class _AvgPoolApplied(Protocol):
    def __call__(self, x: Operand, /, stride: float | Any = ..., pad: str | Any = ..., pad_counts: float | Any = ...) -> Tensor: ...

class _AvgPool(Protocol):
    def __getitem__(self, dims: By | tuple[By, ...], /) -> _AvgPoolApplied: ...

class _BatchNormApplied(Protocol):
    def __call__(self, x: Operand, g: Operand = ..., b: Operand = ..., eps: Operand = ...) -> Tensor: ...

class _BatchNorm(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _BatchNormApplied: ...

class _BincountApplied(Protocol):
    def __call__(self, ids: Operand) -> Tensor: ...

class _Bincount(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _BincountApplied: ...

class _BroadcastApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Broadcast(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _BroadcastApplied: ...

class _Cast(Protocol):
    def __call__(self, x: Operand, /, dtype: DType | str) -> Tensor: ...

class _ConcatApplied(Protocol):
    def __call__(self, *tensors: Operand) -> Tensor: ...

class _Concat(Protocol):
    def __getitem__(self, dims: Dim | Arrow, /) -> _ConcatApplied: ...

class _ConvApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, /, stride: float | Any = ..., pad: str | Any = ..., dilation: float | Any = ..., *, out: Sequence[Dim] | None = ...) -> Tensor: ...

class _Conv(Protocol):
    def __getitem__(self, dims: By | tuple[By, ...], /) -> _ConvApplied: ...

class _Cos(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _CrossEntropyApplied(Protocol):
    def __call__(self, logits: Operand, targets: Operand, /, ignore_index: float | Any = ...) -> Tensor: ...

class _CrossEntropy(Protocol):
    def __getitem__(self, dims: Dim, /) -> _CrossEntropyApplied: ...

class _CumprodApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Cumprod(Protocol):
    def __getitem__(self, dims: Dim, /) -> _CumprodApplied: ...

class _CumsumApplied(Protocol):
    def __call__(self, x: Operand, /, exclusive: float | Any = ..., reverse: float | Any = ...) -> Tensor: ...

class _Cumsum(Protocol):
    def __getitem__(self, dims: Dim, /) -> _CumsumApplied: ...

class _Div(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _DropoutApplied(Protocol):
    def __call__(self, x: Operand, /, rate: float | Any, seed: Operand | None = ...) -> Tensor: ...

class _Dropout(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _DropoutApplied: ...
    def __call__(self, x: Operand, /, rate: float | Any, seed: Operand | None = ...) -> Tensor: ...

class _Einsum(Protocol):
    def __call__(self, *tensors: Operand, out: Sequence[Dim]) -> Tensor: ...

class _Elu(Protocol):
    def __call__(self, x: Operand) -> Tensor: ...

class _Eq(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Erf(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Exp(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Floor(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Floordiv(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Ge(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Gelu(Protocol):
    def __call__(self, x: Operand, /, approximate: str | Any = ...) -> Tensor: ...

class _GroupNormApplied(Protocol):
    def __call__(self, x: Operand, g: Operand = ..., b: Operand = ..., eps: Operand = ...) -> Tensor: ...

class _GroupNorm(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _GroupNormApplied: ...

class _GroupedEinsum(Protocol):
    def __call__(self, x: Operand, y: Operand, z: Operand, /, rows: float | Any = ..., *, out: Sequence[Dim]) -> Tensor: ...

class _Gt(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _HardSwish(Protocol):
    def __call__(self, x: Operand) -> Tensor: ...

class _Identity(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Iota(Protocol):
    def __getitem__(self, dims: Dim, /) -> Tensor: ...

class _LayerNormApplied(Protocol):
    def __call__(self, x: Operand, g: Operand = ..., b: Operand = ..., /, eps: float | Any = ...) -> Tensor: ...

class _LayerNorm(Protocol):
    def __getitem__(self, dims: Dim, /) -> _LayerNormApplied: ...

class _Le(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _LeakyRelu(Protocol):
    def __call__(self, x: Operand, slope: Operand = ...) -> Tensor: ...

class _LinearRecurrenceApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, z: Operand = ..., /, reverse: float | Any = ...) -> Tensor: ...

class _LinearRecurrence(Protocol):
    def __getitem__(self, dims: Dim, /) -> _LinearRecurrenceApplied: ...

class _Log(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _LogSoftmaxApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _LogSoftmax(Protocol):
    def __getitem__(self, dims: Dim, /) -> _LogSoftmaxApplied: ...

class _Logaddexp(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _LogicalAnd(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _LogicalNot(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _LogicalOr(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _LogsumexpApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Logsumexp(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _LogsumexpApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Lt(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _MaskPaddingApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _MaskPadding(Protocol):
    def __getitem__(self, dims: Dim, /) -> _MaskPaddingApplied: ...

class _MaxApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Max(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _MaxApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _MaxPoolApplied(Protocol):
    def __call__(self, x: Operand, /, stride: float | Any = ..., pad: str | Any = ...) -> Tensor: ...

class _MaxPool(Protocol):
    def __getitem__(self, dims: By | tuple[By, ...], /) -> _MaxPoolApplied: ...

class _Maximum(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _MeanApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Mean(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _MeanApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _MinApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Min(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _MinApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Minimum(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Mod(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Mul(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Ne(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _Neg(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _NormalApplied(Protocol):
    def __call__(self, seed: Operand | None = ..., std: float | Any = ..., dtype: DType | str = ...) -> Tensor: ...

class _Normal(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _NormalApplied: ...
    def __call__(self, *numbers: float) -> Form: ...

class _OneHotApplied(Protocol):
    def __call__(self, x: Operand, /, dtype: DType | str = ...) -> Tensor: ...

class _OneHot(Protocol):
    def __getitem__(self, dims: Dim, /) -> _OneHotApplied: ...

class _OnesApplied(Protocol):
    def __call__(self, dtype: DType | str = ...) -> Tensor: ...

class _Ones(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _OnesApplied: ...
    def __call__(self, *numbers: float) -> Form: ...

class _PadApplied(Protocol):
    def __call__(self, x: Operand, /, before: float | Any, after: float | Any, value: float | Any = ...) -> Tensor: ...

class _Pad(Protocol):
    def __getitem__(self, dims: Arrow, /) -> _PadApplied: ...

class _Pow(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _ProdApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Prod(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _ProdApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _PutApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, z: Operand, /) -> Tensor: ...

class _Put(Protocol):
    def __getitem__(self, dims: Dim, /) -> _PutApplied: ...

class _Relu(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _ReverseApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Reverse(Protocol):
    def __getitem__(self, dims: Dim, /) -> _ReverseApplied: ...

class _RmsNormApplied(Protocol):
    def __call__(self, x: Operand, g: Operand = ..., /, eps: float | Any = ...) -> Tensor: ...

class _RmsNorm(Protocol):
    def __getitem__(self, dims: Dim, /) -> _RmsNormApplied: ...

class _RollApplied(Protocol):
    def __call__(self, x: Operand, /, by: float | Any) -> Tensor: ...

class _Roll(Protocol):
    def __getitem__(self, dims: Dim, /) -> _RollApplied: ...

class _Rsqrt(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _SampleApplied(Protocol):
    def __call__(self, logits: Operand, seed: Operand = ..., temperature: Operand = ...) -> Tensor: ...

class _Sample(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _SampleApplied: ...

class _ScatterAddApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, /, *, out: Sequence[Dim] | None = ...) -> Tensor: ...

class _ScatterAdd(Protocol):
    def __getitem__(self, dims: Dim, /) -> _ScatterAddApplied: ...

class _ShiftApplied(Protocol):
    def __call__(self, x: Operand, /, by: float | Any) -> Tensor: ...

class _Shift(Protocol):
    def __getitem__(self, dims: Dim, /) -> _ShiftApplied: ...

class _Sigmoid(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Sign(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Silu(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Sin(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _SoftmaxApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Softmax(Protocol):
    def __getitem__(self, dims: Dim, /) -> _SoftmaxApplied: ...

class _Softplus(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _SortApplied(Protocol):
    def __call__(self, x: Operand, /) -> tuple[Tensor, Tensor]: ...

class _Sort(Protocol):
    def __getitem__(self, dims: Dim, /) -> _SortApplied: ...

class _SortedRoutingApplied(Protocol):
    def __call__(self, logits: Operand) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...

class _SortedRouting(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _SortedRoutingApplied: ...

class _Sqrt(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Square(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _StopGradient(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Sub(Protocol):
    def __call__(self, x: Operand, y: Operand, /) -> Tensor: ...

class _SumApplied(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Sum(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _SumApplied: ...
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Tanh(Protocol):
    def __call__(self, x: Operand, /) -> Tensor: ...

class _Top2GatingApplied(Protocol):
    def __call__(self, logits: Operand, noise: Operand = ...) -> tuple[Tensor, Tensor, Tensor]: ...

class _Top2Gating(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _Top2GatingApplied: ...

class _TopKApplied(Protocol):
    def __call__(self, x: Operand, /) -> tuple[Tensor, Tensor]: ...

class _TopK(Protocol):
    def __getitem__(self, dims: Arrow, /) -> _TopKApplied: ...

class _TopKGatingApplied(Protocol):
    def __call__(self, logits: Operand) -> tuple[Tensor, Tensor, Tensor]: ...

class _TopKGating(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _TopKGatingApplied: ...

class _TopKRoutingApplied(Protocol):
    def __call__(self, logits: Operand) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...

class _TopKRouting(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _TopKRoutingApplied: ...

class _UniformApplied(Protocol):
    def __call__(self, seed: Operand | None = ..., dtype: DType | str = ...) -> Tensor: ...

class _Uniform(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _UniformApplied: ...
    def __call__(self, *numbers: float) -> Form: ...

class _UpconvApplied(Protocol):
    def __call__(self, x: Operand, y: Operand, /, stride: float | Any = ..., pad: str | Any = ..., dilation: float | Any = ..., *, out: Sequence[Dim] | None = ...) -> Tensor: ...

class _Upconv(Protocol):
    def __getitem__(self, dims: By | tuple[By, ...], /) -> _UpconvApplied: ...

class _Where(Protocol):
    def __call__(self, x: Operand, y: Operand, z: Operand, /) -> Tensor: ...

class _WindowApplied(Protocol):
    def __call__(self, x: Operand, /, before: float | Any = ...) -> Tensor: ...

class _Window(Protocol):
    def __getitem__(self, dims: By | tuple[By, ...], /) -> _WindowApplied: ...

class _ZerosApplied(Protocol):
    def __call__(self, dtype: DType | str = ...) -> Tensor: ...

class _Zeros(Protocol):
    def __getitem__(self, dims: _Dims, /) -> _ZerosApplied: ...
    def __call__(self, *numbers: float) -> Form: ...


abs: _Abs
add: _Add
all: _All
any: _Any
argmax: _Argmax
attention: _Attention
avg_pool: _AvgPool
batch_norm: _BatchNorm
bincount: _Bincount
broadcast: _Broadcast
cast: _Cast
concat: _Concat
conv: _Conv
cos: _Cos
cross_entropy: _CrossEntropy
cumprod: _Cumprod
cumsum: _Cumsum
div: _Div
dropout: _Dropout
einsum: _Einsum
elu: _Elu
eq: _Eq
erf: _Erf
exp: _Exp
floor: _Floor
floordiv: _Floordiv
ge: _Ge
gelu: _Gelu
group_norm: _GroupNorm
grouped_einsum: _GroupedEinsum
gt: _Gt
hard_swish: _HardSwish
identity: _Identity
iota: _Iota
layer_norm: _LayerNorm
le: _Le
leaky_relu: _LeakyRelu
linear_recurrence: _LinearRecurrence
log: _Log
log_softmax: _LogSoftmax
logaddexp: _Logaddexp
logical_and: _LogicalAnd
logical_not: _LogicalNot
logical_or: _LogicalOr
logsumexp: _Logsumexp
lt: _Lt
mask_padding: _MaskPadding
max: _Max
max_pool: _MaxPool
maximum: _Maximum
mean: _Mean
min: _Min
minimum: _Minimum
mod: _Mod
mul: _Mul
ne: _Ne
neg: _Neg
normal: _Normal
one_hot: _OneHot
ones: _Ones
pad: _Pad
pow: _Pow
prod: _Prod
put: _Put
relu: _Relu
reverse: _Reverse
rms_norm: _RmsNorm
roll: _Roll
rsqrt: _Rsqrt
sample: _Sample
scatter_add: _ScatterAdd
shift: _Shift
sigmoid: _Sigmoid
sign: _Sign
silu: _Silu
sin: _Sin
softmax: _Softmax
softplus: _Softplus
sort: _Sort
sorted_routing: _SortedRouting
sqrt: _Sqrt
square: _Square
stop_gradient: _StopGradient
sub: _Sub
sum: _Sum
tanh: _Tanh
top2_gating: _Top2Gating
top_k: _TopK
top_k_gating: _TopKGating
top_k_routing: _TopKRouting
uniform: _Uniform
upconv: _Upconv
where: _Where
window: _Window
zeros: _Zeros
glorot: _Initialiser
he: _Initialiser
adafactor: _Optimizer
adam: _Optimizer
adamw: _Optimizer
cosine: _Optimizer
f8: _Optimizer
int8: _Optimizer
linear: _Optimizer
linear_warmup: _Optimizer
momentum: _Optimizer
onebit: _Optimizer
onebit_momentum: _Optimizer
powersgd: _Optimizer
sgd: _Optimizer
topk: _Optimizer

__all__ = [
    "abs",
    "adafactor",
    "adam",
    "adamw",
    "add",
    "all",
    "any",
    "argmax",
    "attention",
    "avg_pool",
    "batch_norm",
    "bincount",
    "broadcast",
    "cast",
    "concat",
    "conv",
    "cos",
    "cosine",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "div",
    "dropout",
    "einsum",
    "elu",
    "eq",
    "erf",
    "exp",
    "f8",
    "floor",
    "floordiv",
    "ge",
    "gelu",
    "glorot",
    "group_norm",
    "grouped_einsum",
    "gt",
    "hard_swish",
    "he",
    "identity",
    "int8",
    "iota",
    "layer_norm",
    "le",
    "leaky_relu",
    "linear",
    "linear_recurrence",
    "linear_warmup",
    "log",
    "log_softmax",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsumexp",
    "lt",
    "mask_padding",
    "max",
    "max_pool",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mod",
    "momentum",
    "mul",
    "ne",
    "neg",
    "normal",
    "one_hot",
    "onebit",
    "onebit_momentum",
    "ones",
    "pad",
    "pow",
    "powersgd",
    "prod",
    "put",
    "relu",
    "reverse",
    "rms_norm",
    "roll",
    "rsqrt",
    "sample",
    "scatter_add",
    "sgd",
    "shift",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "sort",
    "sorted_routing",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "sum",
    "tanh",
    "top2_gating",
    "top_k",
    "top_k_gating",
    "top_k_routing",
    "topk",
    "uniform",
    "upconv",
    "where",
    "window",
    "zeros",
]
