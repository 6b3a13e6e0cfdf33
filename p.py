# f.mdsl, program learn: what each of 2 devices does.
# mesh two { d: 2 }, layout data, partial values reduced: optimal
# torchrun --nproc-per-node 2 THIS_FILE [--inputs F] [--params F] [--seed S] [--out F.npz]
# made by meshdsl 0.1.0

import numpy as np
import torch
import torch.distributed as dist

MESH = {"d": 2}
GROUPS = (("d",),)
INPUTS = {
    "x": "f32[batch=4@d, io=2] = normal(1.0)",
}
PARAMS = {
    "w": "f32[io=2] = normal(0.7071067811865475)",
}
STATES = {
    "step": "i32[] = steps()",
}
OUTPUTS = {
    "loss": "f32[]",
}
LOSS = "loss"


def device(rank, groups, inputs, params, states):
    """What device `rank` of 2 does; the same text for all of them."""
    x = inputs["x"]  # f32[batch@d, io]
    w = params["w"]  # f32[io]
    step = states["step"]  # i32[]

    # f.mdsl:6  loss = mean((einsum(x, w -> [batch]) - 1.0)^2)
    sub = x @ w  # f32[batch@d]
    sub.sub_(1.0)
    loss_part = squared_norm(sub) / 4  # f32[] partial sum over d
    d_sub = sub * 0.5  # f32[batch@d]
    d_w_part = d_sub @ x  # f32[io] partial sum over d
    # all_reduce, 12 B sent in a bucket of 2:
    # loss: the mean of squares reduces `batch`, which `batch -> d` (line 3) splits
    # d_w: `einsum` reduces `batch`, which `batch -> d` (line 3) splits
    # loss: f32[]
    # d_w: f32[io]
    loss, d_w = all_reduce_bucket([loss_part, d_w_part], groups["d"], "sum")

    # f.mdsl:8  minimize loss with sgd(0.1)
    step.add_(1)
    w.sub_(d_w, alpha=0.1)

    return {"loss": loss}


# ------------------------- the runtime: functions that the program calls --------------------------


import argparse
import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import sys
import time
import traceback
import zipfile
from typing import Any, NamedTuple


def make_groups(mesh, groups, rank):
    """The process group of this device over each set of mesh axes, under `"axis+axis"`."""
    by_axes = {}
    for axes in groups:
        for members in group_members(mesh, axes):  # all processes take part in making all groups
            is_world = len(members) == dist.get_world_size() and ":" not in "".join(axes)
            group = dist.group.WORLD if is_world else dist.new_group(members)
            if rank in members:
                by_axes["+".join(axes)] = group
    return by_axes


class Pending:
    """A collective under way: until `wait`, its result is not there, and what is sent is needed."""

    def __init__(self, kind, work, finish):
        self.kind, self.work, self.finish = kind, work, finish

    def wait(self):
        """The result, once it has arrived; it is not kept here."""
        work, finish = self.work, self.finish
        del self.work, self.finish
        work.wait()
        return finish()


def as_numbers(x):
    """The same memory; truth values and 8-bit floats as bytes, which every backend can send."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def as_sent(x, op):
    """What is reduced for `x`: itself, or for an extreme of floats integers in their order."""
    if op not in ("max", "min") or not x.is_floating_point():
        return x
    wide = x if x.element_size() > 2 else x.float()  # no integers of two bytes can be sent
    bits = wide.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    least, most = torch.iinfo(bits.dtype).min, torch.iinfo(bits.dtype).max
    codes = torch.where(bits < 0, bits ^ most, bits)
    return codes.masked_fill_(wide.isnan(), most if op == "max" else least)


def as_received(x, dtype):
    """What a reduction of `as_sent` yields, in the dtype of what was to be reduced."""
    if x.dtype == dtype:
        return x
    bits = torch.where(x < 0, x ^ torch.iinfo(x.dtype).max, x)
    return bits.view(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def reduce_op(op, x):
    """Torch's name of a reduction; of truth values the sum is `or` and the product `and`."""
    op = {"sum": "max", "prod": "min"}.get(op, op) if x.dtype == torch.bool else op
    return getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))


def torch_dtype(name):
    """Torch's dtype of a name such as `f32`."""
    letters = name.rstrip("0123456789")
    long = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}.get(letters, letters)
    return getattr(torch, long + name.removeprefix(letters))


def local_value(name, spec, file, seed, mesh, rank):
    """The part of a tensor that device `rank` holds: of the file, or made up if it has none."""
    part, dtype = local_part(spec, mesh, rank), torch_dtype(spec.dtype)
    if (spec.key or name) not in file:
        return torch.from_numpy(drawn_part(spec, name, seed, part)).to(dtype)
    try:
        array = torch.as_tensor(file[spec.key or name])
    except Exception as error:  # a damaged archive raises errors of all kinds
        raise ValueError(f"{spec.key or name} cannot be read: {error!r}") from None
    kinds = {(d.is_floating_point, d == torch.bool) for d in (array.dtype, dtype)}
    if len(kinds) > 1 or tuple(array.shape) != tuple(spec.dims.values()):
        raise ValueError(f"{name} is {array.dtype}{[*array.shape]}, not {spec.dtype}{spec.dims}")
    block, value = array[part], array[part].to(dtype, copy=True)
    lost = value.isinf() & block.isfinite() if dtype.is_floating_point else value != block
    if lost.any():
        raise ValueError(f"{name} holds values that do not fit {spec.dtype}")
    return value


def main(mesh, groups, device, outputs, *tables, assigned=(), local=local_value):
    """Run `device` as one process of many. Exits with 2 on a wrong command, 3 on a failure."""
    sys.stdout = open(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no output of the program
    rank, code = int(os.environ.get("RANK", "0")), 2
    specs = [{name: spec_of(text) for name, text in table.items()} for table in (*tables, outputs)]
    try:
        options = parse_options(mesh, trains=len(tables) > 2)
        arrays = read_file(options.params, specs[1], assigned)
        files = [read_file(options.inputs, specs[0]), arrays, arrays]
        held = [
            {n: local(n, spec, file, options.seed, mesh, rank) for n, spec in table.items()}
            for table, file in zip(specs[:-1], files, strict=False)
        ]
        code, where = 3, start(rank, math.prod(mesh.values()))
        held = on_device(held, specs, where)
        with torch.inference_mode():
            results = device(rank, make_groups(mesh, groups, rank), *held)
        for name, spec in specs[-1].items() if rank == 0 else ():
            value = "" if spec.dims else f" = {results[name].item()}"
            print(f"{name}: {spec.dtype}{[*spec.dims.values()]}{value}", flush=True)
        if options.out:
            write_whole(options.out, specs[-1], mesh, results)
        if options.updated:
            write_whole(options.updated, specs[1] | specs[2], mesh, held[1] | held[2])
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:  # whatever it is, the user gets a sentence and the line
        trace = [(f.f_code.co_qualname, at) for f, at in traceback.walk_tb(error.__traceback__)]
        lines = [at for name, at in trace if name.partition(".<locals>")[0] == "device"]  # or in it
        at = f" on device {rank}, line {lines[-1]} of {sys.argv[0]}" if lines else ""
        time.sleep(5 if code == 2 and rank else 0)  # all refuse alike: device 0 ends the others
        print(f"error{at}: {error}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # others may have failed too: let them tell it
        os._exit(code)
    dist.barrier()  # without it gloo may abort when one process closes while others still read
    dist.destroy_process_group()


def on_device(tables, specs, where):
    """Inputs, parameters and states on a device: their counter stays on the host."""
    return [
        {n: x if is_counter(of[n]) else x.to(where) for n, x in table.items()}
        for table, of in zip(tables, specs, strict=False)
    ]


def is_counter(spec):
    """Whether a state counts the steps: what is computed of it are numbers of the host."""
    return spec.draw == ("steps",)


def parse_options(mesh, trains):
    """The options of the command line; ValueError for what cannot be done."""
    devices, world = math.prod(mesh.values()), os.environ.get("WORLD_SIZE", "1")
    command = f"torchrun --nproc-per-node {devices} {' '.join(sys.argv)}"
    parser = argparse.ArgumentParser(epilog=f"Start it with: {command}")
    for name in ("--inputs", "--params"):
        parser.add_argument(name, metavar="FILE", help=".npz or .safetensors; else of the seed")
    parser.add_argument("--seed", type=int, default=0, help="for values that are made up")
    for name, what in (("--out", "outputs"), ("--updated", "parameters and states"))[: 1 + trains]:
        parser.add_argument(name, metavar="FILE.npz", help=f"write {what} as global arrays")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    options = parser.parse_args(namespace=argparse.Namespace(updated=None))
    if world != str(devices):
        wanted = f"{devices} devices, {{ {', '.join(f'{a}: {size}' for a, size in mesh.items())} }}"
        raise ValueError(f"this program is for {wanted}, but {world} started\nrun: {command}")
    for path in filter(None, (options.out, options.updated)):
        if not path.endswith(".npz") or not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"{path} cannot be written: it is no .npz, or there is no folder")
        if (os.path.exists(path) and not options.force) or options.out == options.updated:
            raise ValueError(f"{path} exists, or is named twice; --force overwrites it")
    return options


def read_file(path, specs, optional=()):
    """The arrays of a .npz or .safetensors file by name; nothing in it can run code."""
    if path is None:
        return {}
    file = open(path, "rb", opener=regular)  # it stays open: arrays are read as they are needed
    try:
        arrays = FileTensors(file) if path.endswith(".safetensors") else np.load(file)
        if isinstance(arrays, np.ndarray):
            raise ValueError("it holds one array without a name")
    except Exception as error:  # it is damaged, or of another kind
        file.close()
        raise ValueError(f"{path} cannot be read: {error!r}") from None
    needed = {name for name, spec in specs.items() if spec.draw != ("seed",)}
    if not needed - set(optional) <= set(arrays) <= set(specs):
        raise ValueError(f"{path} holds {', '.join(arrays)}, but needed are {', '.join(specs)}")
    return arrays


class FileTensors(dict[str, Any]):
    """The tensors of an open .safetensors file by name, each read where it is asked for."""

    def __init__(self, file):
        size = int.from_bytes(file.read(8), "little")
        super().__init__(json.loads(file.read(min(size, 100_000_000))))
        self.pop("__metadata__", None)
        self.file, self.start = file, 8 + size

    def __getitem__(self, name):
        entry = super().__getitem__(name)
        first, end = entry["data_offsets"]
        data = bytearray(end - first)
        self.file.seek(self.start + first)
        if self.file.readinto(data) < len(data):
            raise ValueError(f"{self.file.name} ends within it")
        stored = torch.from_numpy(np.frombuffer(data, np.uint8))
        return stored.view(torch_dtype(entry["dtype"].lower())).view(entry["shape"])


def start(rank, world):
    """Join the others (none without torchrun): over nccl if each has a GPU, else over gloo."""
    choose_vector_kernels()
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    where = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
        torch.set_default_device(where)
        torch.backends.cudnn.allow_tf32 = False  # f32 has 24 bits here, as on a CPU
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
    about = {"backend": "nccl", "device_id": where} if on_gpu else {"backend": "gloo"}
    dist.init_process_group(store=store, rank=rank, world_size=world, **about)
    return where


def write_whole(path, specs, mesh, local):
    """Write tensors as global arrays to a .npz file, on device 0; all devices take part."""
    wide = {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in local.items()}
    held = [None] * math.prod(mesh.values()) if dist.get_rank() == 0 else None
    dist.gather_object({name: x.cpu().numpy() for name, x in wide.items()}, held)
    if held is None:
        return
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, spec in specs.items():
            array = np.full([*spec.dims.values()], -0.0, held[0][name].dtype)
            for rank in first_replicas(spec, mesh):
                array[local_part(spec, mesh, rank)] += held[rank][name]
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def all_reduce_bucket(xs, group, op):
    """The sum (max, min, prod) over the group of each tensor, which may be overwritten."""
    return all_reduce_bucket_start(xs, group, op).wait()


def all_reduce_bucket_start(xs, group, op):
    """Begin an `all_reduce_bucket`."""
    sent, dtype = [as_sent(x, op).contiguous() for x in xs], xs[0].dtype
    options = asynchronous(dist.AllreduceCoalescedOptions())
    options.reduceOp = reduce_op(op, xs[0])
    work = group.allreduce_coalesced([as_numbers(x) for x in sent], options)
    return Pending("all_reduce", work, lambda: [as_received(x, dtype) for x in sent])


def asynchronous(options):
    """The options of a collective that does not wait; before torch 2.8 none of them did."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


BLOCK = 1 << 16
"""How many squares BLAS adds up at once: it does so in the dtype, and blocks stay exact."""


def squared_norm(x):
    """The sum of the squares of all elements; on a processor without a tensor of the squares."""
    if not x.is_contiguous():
        strides = x.stride()
        x = x.permute(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    if not (x.is_cpu and x.is_contiguous()):
        return torch.square(x).sum()
    flat = x.view(-1)
    if flat.numel() <= BLOCK:
        return torch.dot(flat, flat)
    return torch.stack([torch.dot(block, block) for block in torch.split(flat, BLOCK)]).sum()


EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
"""How a file is created that nobody else has made: through no link, which would exist."""


def regular(path, flags):
    """Open a file: the `opener` of `open`. OSError for a folder, a pipe, a socket or a device."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)  # no difference to a file
    try:
        check_regular(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def check_regular(path, mode):
    """Raise OSError for what only looks like a file."""
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)


@contextlib.contextmanager
def replacing(path, sync=True):
    """A seekable file to write; it takes the place of `path` once the block ends without error."""
    target = os.path.realpath(path)
    before = os.lstat(target) if os.path.lexists(target) else None
    if before:
        check_regular(target, before.st_mode)
    import secrets  # reading a file needs none

    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.part")
    # Made here, through no link. One like an old file is closed to others until it is whole.
    handle = os.open(beside, EXCLUSIVE, 0o600 if before else 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if before:
                with contextlib.suppress(PermissionError):
                    os.fchown(handle, before.st_uid, before.st_gid)
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            if sync:
                os.fsync(handle)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


class Spec(NamedTuple):
    """A tensor: sizes of dims in order, the mesh axes that split them, how values are made up."""

    dtype: str
    dims: dict[str, int]
    split: dict[str, tuple[str, ...]]
    draw: tuple[Any, ...] | None = None
    key: str = ""
    parts: tuple[str, ...] = ()
    blocks: dict[str, list[list[int]]] | None = None
    away: str = ""


def spec_of(text):
    """The tensor written as `f32[vocab=512@tp, model=256] = normal(0.02)`, perhaps ` as key`."""
    form = r"^(\w+)\[(.*?)\](?: over ([\w. ]+?))?(?: on (\w+))?(?: = (\w+)\((.*?)\))?(?: as (.+))?$"
    dtype, at, parts, away, how, numbers, key = re.findall(form, text)[0]
    at = re.sub(r"(\d+)-(\d+)", lambda m: ".".join(map(str, range(int(m[1]), int(m[2]) + 1))), at)
    entries = re.findall(r"([^ ,=]+)=(\d+):?([\d.|]*)@?([^ ,]*)", at)
    sizes = {dim: int(size) for dim, size, _, _ in entries}
    split = {dim: tuple(axes.split("+")) for dim, _, _, axes in entries if axes}
    lying = ((dim, at.split("|")) for dim, _, at, _ in entries if at)
    blocks = {dim: [[int(n) for n in b.split(".") if n] for b in each] for dim, each in lying}
    draw = (how, *(float(x) for x in numbers.split(", ") if x)) if how else None
    return Spec(dtype, sizes, split, draw, key, tuple(parts.split()), blocks or None, away)


def coordinates(mesh, rank):
    """Where device `rank` stands on every axis (row-major: the last axis varies fastest)."""
    at = dict(mesh)
    for axis in reversed(mesh):
        rank, at[axis] = divmod(rank, mesh[axis])
    return at


def group_members(mesh, axes):
    """The ranks of every group of devices that differ only along `axes`, in mesh order."""
    varying = {axis.partition(":")[0] for axis in axes}
    within, groups, stride = [0], [0], math.prod(mesh.values())
    for axis, size in mesh.items():
        stride //= size
        if axis in varying or axis.partition(".")[0] in varying:
            within = [rank + n * stride for rank in within for n in range(size)]
        else:
            groups = [rank + n * stride for rank in groups for n in range(size)]
    return [[first + rank for rank in within] for first in groups]


def block(size, ways, at):
    """First index and size of one block of a dim that is split into `ways`, the outer first."""
    start, extent = 0, size
    for way, number in zip(ways, at, strict=True):
        part = -(-extent // way) if isinstance(way, int) else way[number]
        before = min(number * part, extent) if isinstance(way, int) else sum(way[:number]) - start
        start, extent = start + before, min(part, extent - before)
    return start, extent


def local_part(spec, mesh, rank):
    """What device `rank` holds of each dim."""
    at, parts = coordinates(mesh, rank), list[slice | list[int]]()
    for dim, size in spec.dims.items():
        on, blocks = spec.split.get(dim, ()), (spec.blocks or {}).get(dim, ())
        ways = tuple(tuple(map(len, blocks)) if blocks[1:] and a == on[0] else mesh[a] for a in on)
        start, extent = block(size, ways, tuple(at[a] for a in on))
        selected = slice(start, start + extent)
        lying = [i for each in blocks for i in each][selected]
        parts.append(selected if lying in ([], [*range(start, selected.stop)]) else lying)
    return tuple(parts)


def first_replicas(spec, mesh):
    """The devices that have the first replica of a block of a tensor, or of a part of a sum."""
    return group_members(mesh, (*spec.parts, *(a for axes in spec.split.values() for a in axes)))[0]


def drawn_part(spec, name, seed, part, chunk=1 << 15):
    """Made-up values of one block of a tensor: of the seed, the name and the index in all of it."""
    assert spec.draw is not None, f"{name} cannot be made up"
    kinds = {"f64": "f8", "f16": "f2", "i64": "i8", "i32": "i4", "bool": "?"}  # others are float32
    indices = [np.arange(size)[p] for size, p in zip(spec.dims.values(), part, strict=True)]
    values = np.empty([len(index) for index in indices], kinds.get(spec.dtype, "f4"))
    if spec.draw[0] in ("zeros", "ones", "steps"):
        return np.full_like(values, spec.draw[0] == "ones")
    if spec.draw[0] == "seed":
        seeds = [step_seed(seed, n) if values.shape else seed for n in range(values.size)]
        return np.reshape(seeds, values.shape)
    digest = hashlib.blake2b(f"{seed}\0{spec.key or name}".encode(), digest_size=8).digest()
    key, flat = np.frombuffer(digest, "<u8").astype(np.uint64), values.reshape(-1)
    chunk = min(chunk, 64 * max(1, -(-flat.size // 64)))
    for start in range(0, flat.size, chunk):
        # Always full vectors, so that every element goes through the same loop of numpy.
        at = np.unravel_index(np.arange(start, start + chunk) % flat.size, [1, *values.shape])
        here = (at[0], *(index[a] for index, a in zip(indices, at[1:], strict=True)))
        index = np.ravel_multi_index(here, [1, *spec.dims.values()])
        flat[start : start + chunk] = drawn(spec.draw, key, index)[: flat.size - start]
    return values


def step_seed(seed, step):
    """The seed of the random numbers of one step of a run, or of one of its batches."""
    digest = hashlib.blake2b(f"{seed}\0step {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def drawn(how, key, index):
    """The values at `index` of the stream of random numbers that `key` names."""
    unit = unit_interval(key, 2 * index)
    if how[0] == "uniform":
        unit = how[1] + (how[2] - how[1]) * unit
    elif how[0] == "normal":  # after Box and Muller
        angle = 2 * math.pi * unit_interval(key, 2 * index + 1)
        unit = how[1] * np.sqrt(-2 * np.log(1 - unit)) * np.cos(angle)
    else:  # integers below a number, or truth values
        unit = np.floor(unit * (how[1] if how[0] == "below" else 2))
    return np.asarray(unit)


def unit_interval(key, counter):
    """A number in [0, 1) for each counter: 53 random bits."""
    return np.asarray((splitmix64(key, counter) >> np.uint64(11)) * 2.0**-53)


def splitmix64(key, counter):
    """64 random bits for each counter (SplitMix64, Steele et al. 2014)."""
    bits = key + counter.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


VECTOR_FUNCTIONS = (
    "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc".split()
)
"""The functions of torch that call MKL's vector math on a processor (ATen's `cpu/vml.h`)."""


def choose_vector_kernels():
    """Call every vector function once, before several threads do."""
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(torch.zeros(1, dtype=dtype, device="cpu"))


if __name__ == "__main__":
    main(MESH, GROUPS, device, OUTPUTS, INPUTS, PARAMS, STATES)
