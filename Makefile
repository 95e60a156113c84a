# make demo   sets up and runs the whole chain; ends with demo/report.html
# make test   sets up and passes the tests
.PHONY: demo test setup lint types docs ci-checks clean

VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=

demo: setup
	$(PY) demo/run_demo.py

test: setup
	scripts/with_ros.sh $(PY) -m pytest $(PYTEST_ARGS)

setup:
	@scripts/setup.sh $(VENV)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

types: setup
	scripts/typecheck.sh $(VENV)

docs: setup
	$(VENV)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf build docs/_build demo/out demo/report.html ros_ws/build ros_ws/install ros_ws/log
