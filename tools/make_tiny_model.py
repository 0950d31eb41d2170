"""Write the tiny test model to a folder: `python tools/make_tiny_model.py FOLDER [--seed 0] [--untied]`."""

import argparse
from pathlib import Path

from tests.support.tiny_model import make_tiny_model


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(description="Write the tiny random test model as a Hugging Face folder.")
    parser.add_argument("folder", type=Path, help="where to write; created when missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--untied", action="store_true", help="give the output layer its own weights")
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.folder, seed=arguments.seed, tie_embeddings=not arguments.untied))


if __name__ == "__main__":
    main()
