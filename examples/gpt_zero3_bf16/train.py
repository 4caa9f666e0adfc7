"""Trains this package: torchrun --standalone --nproc-per-node 4 train.py --steps 20"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from runtime.processes import signals  # noqa: E402

if __name__ == "__main__":
    signals.block_signals()  # until this rank can say why it stops

    from runtime.train.train import main

    sys.exit(main(sys.argv[1:], ROOT))
