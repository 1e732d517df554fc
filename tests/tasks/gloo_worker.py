"""One of four processes: trains with tasks and adapters; the folder has the program, the parameters and the batch of each case.

usage: torchrun --nproc-per-node 4 gloo_worker.py FOLDER
"""

import pathlib
import sys

import torch

from tests.gloo_training import train_cases

NUM_STEPS = 2

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    inputs = {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.inputs")}
    train_cases(folder, lambda case: inputs[case][0], lambda case: None, lambda case: [inputs[case][1]] * NUM_STEPS)
