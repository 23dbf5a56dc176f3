# Each target sets itself up on a machine that has Python 3.11 or newer and nothing else; a second call starts at once.

.PHONY: demo test check bench clean

demo: # the bundled checkpoint, offline: PyTorch -> MLX, a story, tokens/s
	@sh scripts/setup
	@sh scripts/with-openblas .venv/bin/openelm demo

test:
	@sh scripts/setup dev
	@sh scripts/with-openblas .venv/bin/python -m pytest -n auto --maxprocesses 4

check: # format, lint, types, tests
	@sh scripts/setup dev
	@sh scripts/check

bench: # reruns every script that proves a claim, and rewrites docs/performance.md with this machine and today's date
	@sh scripts/setup dev
	@sh scripts/with-openblas .venv/bin/python -m openelm_mlx.benchmarks.prove

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
