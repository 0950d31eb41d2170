"""`bazel run //rl:train_grpo -- [--config FILE|NAME] [key=value ...]`: the same as `tandem train`."""

import sys

from rl.cli.app import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
