# Shortcuts. Each prints the command that it stands for, so that Bazel and pytest stay in sight.
.PHONY: fmt lint types unit integration parity docs demo

fmt:
	tools/lint --fix ruff clang_format buildifier build_files
lint:
	tools/lint
types:
	tools/lint mypy
unit:
	./tools/bazel test //tests/unit/... //csrc/...
integration:
	./tools/bazel test //tests/integration/... //tests/engine/... //tests/learning/...
parity:
	./tools/bazel test //tests/unit/ops/... //tests/engine/... //csrc/...
docs:
	tools/python tools/docs.py
demo:
	./tools/bazel run //rl:train_grpo
