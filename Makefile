# Shortcuts. Each prints the command that it stands for, so that Bazel and pytest stay in sight.
.PHONY: fmt lint types unit integration parity gpu bench docs demo

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
gpu:
	tools/gpu_check
bench:
	for name in logprob policy_loss linear_loss pack; do tools/python tools/bench/bench_$$name.py || exit 1; done
docs:
	tools/python tools/docs.py
demo:
	./tools/bazel run //rl:train_grpo
