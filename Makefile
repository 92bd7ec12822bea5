# make run        train PPO with the sqrt bonus and SOFE in Maze 1 for 3 to 7 minutes
# make test       run the tests (make test-slow: those that learn for minutes as well)
# make lint       check format and style
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Procgen needs two libraries of the system, which small containers lack.
LIBRARIES := import ctypes; [ctypes.CDLL(name) for name in ("libGL.so.1", "libglib-2.0.so.0")]
APT := $(shell test "$$(id -u)" = 0 || echo sudo -n) apt-get -qq

.PHONY: run test test-slow lint format benchmarks engine clean

run: $(VENV)/run
	$(BIN)/python ppo_sofe.py --bonus sqrt --augment --ext-coef 0 --beta 0.1 --ent-coef 0.01 \
		--num-envs 32 --num-steps 128 --minibatch-size 256 --update-epochs 4 \
		--channels 16 --embedding-dim 128 --total-timesteps 400000

test: $(VENV)/dev engine
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/dev engine
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(VENV)/dev engine
	$(BIN)/python benchmarks/env_speed.py
	$(BIN)/python benchmarks/godot_speed.py
	$(BIN)/python benchmarks/train_speed.py

# The engine of the 3D map is a Debian package. Where it cannot be had, the tests of the map are skipped.
engine:
	@sh godot/install_engine.sh

# The stamp files say what was installed, and are older than a requirements file that has changed.
$(VENV)/run: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "Python 3.10 to 3.12 is needed: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.txt
	@test "$$(uname -sm)" != "Linux x86_64" || $(BIN)/python -c '$(LIBRARIES)' 2>/dev/null || \
		{ $(APT) update && $(APT) install -y libgl1 libglib2.0-0; } || \
		echo "Procgen needs libGL and GLib, with Debian: apt-get install libgl1 libglib2.0-0"
	touch $@

$(VENV)/dev: requirements-dev.txt $(VENV)/run
	$(PIP) -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV)
