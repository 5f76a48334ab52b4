# `make demo` and `make test` are the two commands; both set everything up when it is not there.
#
#   make demo    train two small models on all cores and prove that the replicas are equal
#   make test    all tests; the last line is pytest's
#   make check   ruff, mypy and the house rules
#   make bench   step times, interleaved with torch's own class; ARGS=--quick is a look
#   make chaos   tests that kill, stop and slow down workers
#   make clean   remove .venv and every cache
#
# PYTHON=...      the interpreter to set up with, instead of the first suitable one
# TORCH_SPEC=...  what to give pip for torch, instead of the pinned version: a wheel, for example

.PHONY: demo test check bench chaos clean setup

PYTHON_HERE := .venv/bin/python

export PYTHON TORCH_SPEC

demo: setup
	@.venv/bin/closeranks demo $(ARGS)

# Two files at a time, because most tests wait for deadlines and not for a processor.
test: setup
	$(PYTHON_HERE) -m pytest -n 2 --dist loadfile

check: setup
	$(PYTHON_HERE) -m ruff check .
	$(PYTHON_HERE) -m ruff format --check .
	$(PYTHON_HERE) -m mypy
	$(PYTHON_HERE) -m pytest tests/tidy

bench: setup
	@$(PYTHON_HERE) bench/step.py $(ARGS)

chaos: setup
	$(PYTHON_HERE) -m pytest tests/chaos

# Quick when there is nothing to do.
setup:
	@sh .ci/setup

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis src/closeranks.egg-info
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
