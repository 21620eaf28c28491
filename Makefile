# `make demo` and `make test` work from a fresh clone: they make the environment when it is missing or out of date.
.PHONY: env demo test lint format

env:
	@scripts/env.sh

demo: env
	.venv/bin/paceline compare recipes/demo.toml --arms none,eagle3 --fresh

test: env
	.venv/bin/python -m paceline.cli.process .venv/bin/python -m pytest

lint: env
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/codespell
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

format: env
	.venv/bin/ruff format
	.venv/bin/ruff check --fix
