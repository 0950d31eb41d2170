"""`bazel run //rl:train_grpo -- [--config FILE|NAME] [key=value ...]`: the same as `tandem train`."""

import sys

from rl.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
