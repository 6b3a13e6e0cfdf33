"""Train a program of tokens on all processes of torchrun, in a loop of torch.

torchrun --nproc-per-node 4 examples/train_module.py examples/lm.mdsl tokens.bin --mesh data:2,tp:2
examples/train.slurm starts it on several machines.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import init_device_mesh

import meshdsl as md


def asked(arguments: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description="Train a program of tokens under torchrun.")
    parser.add_argument("program", help="a .mdsl file whose program takes tokens and targets")
    parser.add_argument("data", help="a flat file of tokens")
    parser.add_argument("--dtype", default="uint16", help="dtype of the tokens (uint16)")
    parser.add_argument("--mesh", required=True, help="axes and sizes, such as data:4,tp:8")
    parser.add_argument("--layout", help="a layout of the file (the first)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step (16)")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence (64)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="DIM=N", help="sizes of dims, or a file of sizes"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", help="a folder for the trained parameters")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step, which is the same on every process."""
    given = asked(arguments)
    axes = dict(axis.split(":") for axis in given.mesh.split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, tuple(map(int, axes.values())), mesh_dim_names=tuple(axes))
    sizes = dict[str, int]()
    for text in given.set:
        dim, _, size = text.partition("=")
        sizes |= {dim: int(size)} if size else md.sizes(text)
    sizes |= {"batch": given.batch, "seq": given.seq}
    model = md.module(given.program, mesh, given.layout, dims=sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    data = np.memmap(given.data, given.dtype, mode="r")
    losses = list[float]()
    for step in range(given.steps):
        # Every process draws the same windows, and keeps its own part.
        starts = np.random.default_rng(step).integers(0, len(data) - given.seq, given.batch)
        windows = np.stack([data[start : start + given.seq + 1] for start in starts]).astype(
            np.int32
        )
        rows = torch.from_numpy(windows).to(device)
        tokens, targets = model.local("tokens", rows[:, :-1]), model.local("targets", rows[:, 1:])
        loss = model(tokens=tokens, targets=targets).loss
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    if given.out is not None:
        save(model.state_dict(), checkpoint_id=given.out)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
