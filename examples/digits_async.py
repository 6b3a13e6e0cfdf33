"""Train on handwritten digits in pipelines whose stages update on the way, one table after another.

`python examples/digits_async.py [SEEDS]` trains `digits_async.mdsl` for 20 epochs in pipelines of 4
and of 8 stages, under each asynchronous schedule and without any, and prints which of 360 images
held out are then classified rightly. The reference engine carries the tables out, version by
version. Needs the `dev` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import meshdsl as md

sys.path.insert(0, str(Path(__file__).parent))

from digits import HELD_OUT, images_and_digits

EPOCHS = 20
MICRO = 88
SCHEDULES = ("ampnet", "pipedream", "two_bw", "pipemare")
PROGRAM = Path(__file__).with_name("digits_async.mdsl")


def trained(schedule: str, stages: int, seed: int = 0, epochs: int = EPOCHS) -> Any:
    """The plan of a pipeline after its epochs."""
    images, _, labels, _ = images_and_digits()
    used = md.scheduled(schedule, "batch", micro=MICRO)
    layout = md.layout(layers="pipe", schedule=used)
    program = md.load(PROGRAM, dims={"layers": stages})
    plan = program.compile(mesh=md.mesh(pipe=stages), layout=layout)
    plan.initialise(seed)
    data = {"images": images, "labels": labels}
    plan.train(data, epochs, seed=seed, engine="reference", progress=False)
    return plan


def accuracy(plan: Any, stages: int) -> float:
    """The part of the images held out that a trained plan's parameters classify rightly."""
    _, images, _, labels = images_and_digits()
    whole = md.load(PROGRAM, dims={"layers": stages, "batch": HELD_OUT}).compile(layout={})
    found = whole.reference(params=plan.params, images=images, labels=labels)
    return float(found.accuracy)


def main() -> int:
    """Print a line per schedule: how many versions stages keep, and the accuracy of each seed."""
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for stages in (4, 8):
        for name in SCHEDULES:
            found = []
            for seed in seeds:
                try:
                    found.append(f"{accuracy(trained(name, stages, seed), stages):.4f}")
                except md.ProgramError as error:
                    found.append(error.diagnostics[0].message)
            print(f"{stages} stages, {name:9} {'  '.join(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
