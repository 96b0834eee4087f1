# Every command of this book. `make help` lists them.

# --- the machine -----------------------------------------------------------------------------------
# CXX   the host's compiler, C++20
# NVCC  the CUDA compiler; empty: emulator only
# ARCH  the GPU to compile for: sm_80, sm_90a, ...; left out, the one in this machine
CXX ?= g++
NVCC ?= $(shell command -v nvcc 2>/dev/null)
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
	sed -nE '1s/^([0-9]+)\.([0-9]+)$$/\1\2/p')
ARCH ?= sm_$(or $(CAPABILITY),80)
WERROR ?=

comma := ,
BUILD := build/$(if $(NVCC),cuda-$(ARCH),cpu)
STEPS := $(sort $(notdir $(wildcard steps/[0-9]*)))
NUMBERS := $(foreach s,$(STEPS),$(word 1,$(subst -, ,$(s))))
PROGRAMS := $(addprefix step-,$(NUMBERS))
step_of = $(filter $(1)-%,$(STEPS))

CXXFLAGS := -std=c++20 -O2 -g -Wall -Wextra -Wshadow -Wno-unknown-pragmas -Wno-restrict \
	$(if $(WERROR),-Werror) -MMD -MP -I.
# A GPU may be newer than ARCH: PTX goes along (not for sm_90a and its like, which are one chip's).
GENCODE := -gencode arch=$(ARCH:sm_%=compute_%),code=$(if $(filter %a,$(ARCH)),$(ARCH),[$(ARCH:sm_%=compute_%)$(comma)$(ARCH)])
NVCCFLAGS := -std=c++20 -O3 -lineinfo $(GENCODE) -Xcompiler -Wall \
	$(if $(WERROR),-Werror all-warnings) -MMD -MP -I.

EMULATOR := block counters fiber memory runtime sites
PROGRAM_OBJECTS := $(addprefix $(BUILD)/common/,program.o options.o csv.o) \
	$(addprefix $(BUILD)/common/emulator/,$(addsuffix .o,$(EMULATOR) device)) \
	$(addprefix $(BUILD)/reference/,attention.o inputs.o verdict.o) \
	$(if $(NVCC),$(BUILD)/common/gpu_device.o)
$(BUILD)/common/emulator/device.o: CXXFLAGS += $(if $(NVCC),-DHAVE_CUDA)

.PHONY: all
all: $(PROGRAMS)  ## build every step

.PHONY: help
help:  ## list the commands
	@echo "make step-02 && ./step-02     build one step and run it; ./step-02 --help"
	@echo "make diff-02                  what step 02 changes in the step before"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
		awk -F'\t' '{printf "make %-24s %s\n", $$1, $$2}'
	@echo
	@echo "NVCC=/path/to/nvcc            use this CUDA compiler; NVCC= builds for the emulator only"
	@echo "ARCH=sm_90                    compile for this GPU; now: $(if $(NVCC),$(ARCH),no nvcc found)"

# --- building ----------------------------------------------------------------------------------------
.SECONDARY:
.SECONDEXPANSION:
.PHONY: $(PROGRAMS)
$(PROGRAMS): %: $(BUILD)/bin/%
	@ln -sf $< $@

$(BUILD)/bin/step-%: $(BUILD)/steps/$$(call step_of,$$*).cpu.o $(PROGRAM_OBJECTS) \
		$(if $(NVCC),$(BUILD)/steps/$$(call step_of,$$*).gpu.o)
	@mkdir -p $(@D)
	$(if $(NVCC),$(NVCC) -Xcompiler -pthread,$(CXX) -pthread) $^ -o $@

$(BUILD)/steps/%.cpu.o: steps/%/attention.cu
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -DSTEP_NAME='"$*"' -x c++ -c $< -o $@

$(BUILD)/steps/%.gpu.o: steps/%/attention.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -DSTEP_NAME='"$*"' -c $< -o $@

$(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c $< -o $@

$(BUILD)/%.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -c $< -o $@

# --- tests -------------------------------------------------------------------------------------------
TEST_SOURCES := $(wildcard common/*_test.cpp common/*/*_test.cpp reference/*_test.cpp steps/*_test.cpp)
TEST_OBJECTS := $(TEST_SOURCES:%.cpp=$(BUILD)/%.o) $(BUILD)/common/test_main.o $(BUILD)/common/process.o \
	$(BUILD)/common/options.o $(BUILD)/common/csv.o $(BUILD)/common/docs/docs.o $(BUILD)/common/docs/values.o \
	$(addprefix $(BUILD)/common/emulator/,$(addsuffix .o,$(EMULATOR))) \
	$(addprefix $(BUILD)/reference/,attention.o inputs.o verdict.o)

$(BUILD)/bin/tests: $(TEST_OBJECTS)
	@mkdir -p $(@D)
	$(CXX) -pthread $^ -o $@

# The tests compile copies of the steps with bugs planted in them, for the emulator, and link them
# with these.
.PHONY: emulator-objects
emulator-objects: $(PROGRAM_OBJECTS)

.PHONY: doctest
doctest:
	@mkdir -p build
	@echo '#include <doctest/doctest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1 || { \
		echo "installing doctest"; \
		sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
		{ $$sudo apt-get install -y doctest-dev || \
		  { $$sudo apt-get update && $$sudo apt-get install -y doctest-dev; }; } >build/doctest.log 2>&1 || { \
		echo "doctest is missing: install it with 'apt-get install doctest-dev' (Debian, Ubuntu)" \
			"or from github.com/doctest/doctest" >&2; exit 1; }; }

.PHONY: test
test: doctest  ## check everything that needs no GPU
	@+$(MAKE) --no-print-directory $(PROGRAMS) $(BUILD)/bin/tests $(BUILD)/bin/docs
	@+$(MAKE) --no-print-directory NVCC= emulator-objects
	@$(BUILD)/bin/tests $(TESTS)

# SANITIZE= leaves compute-sanitizer out.
SANITIZE ?= $(if $(shell command -v compute-sanitizer 2>/dev/null),memcheck racecheck initcheck synccheck)
.PHONY: check-gpu
check-gpu: doctest  ## run every step over the tests' shapes and inputs on the GPU, sanitized
	@+$(MAKE) --no-print-directory $(PROGRAMS) $(BUILD)/bin/tests
	@STEPS_DEVICE=gpu $(BUILD)/bin/tests --test-suite=steps
	@[ -n "$(SANITIZE)" ] || echo "SKIP: compute-sanitizer is not installed"
	@for tool in $(SANITIZE); do echo "compute-sanitizer --tool $$tool"; \
		STEPS_DEVICE=gpu STEPS_PREFIX="compute-sanitizer --tool $$tool --error-exitcode 9" \
		$(BUILD)/bin/tests --test-suite=steps || exit 1; done

.PHONY: bench-emulator
bench-emulator: $(PROGRAMS)  ## time the emulator, checking only and counting
	@for n in $(NUMBERS); do for mode in --check-only ""; do \
		begin=$$(date +%s.%N); \
		./step-$$n --device cpu --batch 1 --heads 2 --seqlen 512 --head-dim 64 $$mode >/dev/null || exit 1; \
		end=$$(date +%s.%N); \
		echo "step-$$n $${mode:-counting}" $$begin $$end; done; done | \
		awk '{ t = $$4 - $$3; printf "%s  %-13s %6.2f s", $$1, $$2, t; \
			if ($$2 == "counting") printf "  %5.1f times as long", t / last; last = t; printf "\n" }'

# --- measurements ------------------------------------------------------------------------------------
# GPU: the name of the results: "NVIDIA H200" becomes h200.
GPU ?= $(if $(CAPABILITY),$(shell nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | \
	tr 'A-Z ' 'a-z-' | sed -E 's/^nvidia-//; s/^geforce-//'))
NCU := $(shell command -v ncu 2>/dev/null)
PYTHON ?= python3
RESULTS := plots/results
REPEAT ?= 3
SWEEP := 512 1024 2048 4096 16384

.PHONY: bench
bench: $(PROGRAMS)  ## measure every step and PyTorch's attention on this GPU, interleaved
	@[ -n "$(GPU)" ] || { echo "make bench: no GPU here" >&2; exit 3; }
	@[ -n "$(NVCC)" ] || { echo "make bench: nvcc is not on the PATH" >&2; exit 3; }
	@rm -f build/bench.csv
	@for i in $$(seq $(REPEAT)); do echo "round $$i of $(REPEAT)"; \
		for n in $(NUMBERS); do ./step-$$n --csv build/bench.csv || exit 1; done; \
		for layout in row-major padded transposed; do \
			./step-03 --k-layout $$layout --batch 1 --csv build/bench.csv || exit 1; done; \
		./step-03 --batch 1 --csv build/bench.csv || exit 1; \
		./step-04 --head-dim 64 --csv build/bench.csv || exit 1; \
		$(PYTHON) plots/peers.py --csv build/bench.csv --matmul; done
	@for n in $(SWEEP); do batch=16; [ $$n -le 8192 ] || batch=8; \
		./step-04 --seqlen $$n --batch $$batch --csv build/bench.csv || exit 1; \
		./step-03 --seqlen $$n --batch 1 --csv build/bench.csv || exit 1; \
		./step-02 --seqlen $$n --batch 1 --csv build/bench.csv || exit 1; \
		./step-00 --seqlen $$n --batch 1 --csv build/bench.csv || exit 1; \
		$(PYTHON) plots/peers.py --seqlen $$n --batch $$batch --csv build/bench.csv; done
	@mv build/bench.csv $(RESULTS)/$(GPU).csv
	@{ nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv; \
		$(NVCC) --version | tail -2; \
		$(PYTHON) -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null || :; } > $(RESULTS)/$(GPU).txt
	@echo "written: $(RESULTS)/$(GPU).csv; 'make plot' draws it"

# One shape for the counters, small enough for the emulator; one for the HBM traffic, whose scores and
# outputs are far larger than the L2 cache.
COUNTED := batch=1 heads=2 seqlen=512 head_dim=128
LARGE := batch=4 heads=16 seqlen=4096 head_dim=128
shape_options = $(foreach s,$(1),--$(subst _,-,$(subst =, ,$(s))))
awk_variables = $(foreach s,$(1),-v $(s))
METRICS := $(shell sed -nE 's/^ *name\["([^"]+_(ld|st|shared)[^"]*|[^"]*shared_ideal)"\].*/\1/p' plots/ncu.awk | paste -sd,)
HBM_METRICS := dram__bytes_read.sum,dram__bytes_write.sum,$(shell echo $(METRICS) | tr , '\n' | grep t_sectors | paste -sd,)
STALL_REASONS := selected not_selected dispatch_stall short_scoreboard long_scoreboard wait mio_throttle math_pipe_throttle barrier
space := $() $()
STALL_METRICS := $(subst $(space),$(comma),smsp__issue_active.avg.pct_of_peak_sustained_active \
	sm__warps_active.avg.per_cycle_active l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed \
	$(STALL_REASONS:%=smsp__average_warps_issue_stalled_%_per_issue_active.ratio))
# measure FILE METRICS SHAPE: appends what ncu measures of each step in turn
define measure
	for step in $(STEPS); do echo "ncu $$step $(3)"; \
		ncu --clock-control none --metrics $(2) --csv ./step-$${step%%-*} --device gpu --check-only \
			$(call shape_options,$(3)) > build/ncu.txt || { tail -3 build/ncu.txt; exit 1; }; \
		awk -f plots/ncu.awk -v step=$$step $(call awk_variables,$(3)) build/ncu.txt | sort >> $(1); done
endef

.PHONY: counters
counters: $(PROGRAMS)  ## count on the emulator and, where there is a GPU and ncu, measure beside it
	@rm -f build/counters.csv build/hbm.csv build/stalls.csv
	@for n in $(NUMBERS); do ./step-$$n --device cpu $(call shape_options,$(COUNTED)) \
		--profile-csv build/counters.csv >build/step.txt || { cat build/step.txt; exit 1; }; head -3 build/step.txt; done
	@cp build/counters.csv $(RESULTS)/emulator-counters.csv
	@[ -n "$(and $(GPU),$(NVCC),$(NCU))" ] || echo "SKIP: no GPU, nvcc or ncu to measure with; the emulator's counts: $(RESULTS)/emulator-counters.csv"
	@[ -z "$(and $(GPU),$(NVCC),$(NCU))" ] || { head -1 build/counters.csv | tee build/hbm.csv > build/stalls.csv; \
		$(call measure,build/counters.csv,$(METRICS),$(COUNTED)); \
		$(call measure,build/hbm.csv,$(HBM_METRICS),$(LARGE)); \
		$(call measure,build/stalls.csv,$(STALL_METRICS),$(LARGE)); \
		mv build/counters.csv $(RESULTS)/$(GPU)-counters.csv; mv build/hbm.csv $(RESULTS)/$(GPU)-hbm-counters.csv; \
		mv build/stalls.csv $(RESULTS)/$(GPU)-stalls-counters.csv; }
	@rm -f $(RESULTS)/trace-*.csv
	@./step-02 --device cpu --trace-csv $(RESULTS)/trace-02-loop-inverted.csv >/dev/null
	@./step-03 --device cpu --trace-csv $(RESULTS)/trace-03-bank-conflicts.csv >/dev/null

.PHONY: regs
regs:  ## print registers and spills of every kernel
	@[ -n "$(NVCC)" ] || { echo "make regs: nvcc is not on the PATH" >&2; exit 3; }
	@mkdir -p build
	@for step in $(STEPS); do $(NVCC) $(NVCCFLAGS) -Xptxas -v -DSTEP_NAME='"x"' -c steps/$$step/attention.cu \
		-o build/regs.o 2>&1 | c++filt -p | awk -v step=$$step ' \
		/Function properties for/ { sub(/.*for /, ""); sub(/\(anonymous namespace\)::/, ""); sub(/\(.*/, ""); sub(/^void /, ""); name = $$0 } \
		/spill/ { spills = $$(NF - 7) + $$(NF - 3) } \
		/Used/ { split($$0, a, "Used "); split(a[2], b, " "); printf "%-24s %-60s %4d registers  %d bytes spilled\n", step, name, b[1], spills }'; done

# --- figures and tables ------------------------------------------------------------------------------
FIGURES := $(filter-out style peers,$(basename $(notdir $(wildcard plots/*.py))))
DOCUMENTS := README.md $(wildcard steps/*/README.md)

$(BUILD)/bin/docs: $(addprefix $(BUILD)/common/docs/,docs.o values.o main.o)
	@mkdir -p $(@D)
	$(CXX) $^ -o $@

.PHONY: docs
docs: $(BUILD)/bin/docs  ## write the measured numbers into README.md and the chapters
	$(BUILD)/bin/docs $(DOCUMENTS)

.PHONY: check-docs
check-docs: $(BUILD)/bin/docs  ## fail if a number, a table or a quote is stale
	$(BUILD)/bin/docs --check $(DOCUMENTS)

# matplotlib: the system's, or in a virtual environment of our own.
.PHONY: plot
plot:  ## redraw the figures from plots/results; your own GPU's ladder goes to build/plots
	@mkdir -p build
	@python=$(PYTHON); $$python -c 'import matplotlib' 2>/dev/null || { \
		python=build/venv/bin/python; \
		[ -x $$python ] || echo "installing matplotlib into build/venv"; \
		[ -x $$python ] || { $(PYTHON) -m venv build/venv && build/venv/bin/pip install -q matplotlib; } \
			>build/venv.log 2>&1 || { rm -rf build/venv; \
			echo "matplotlib is missing: install it with 'apt-get install python3-matplotlib'" >&2; exit 1; }; }; \
	for figure in $(FIGURES); do $$python plots/$$figure.py || exit 1; done; \
	[ "$(GPU)" = h200 ] || [ ! -f $(RESULTS)/$(GPU).csv ] || { mkdir -p build/plots; \
		for figure in ladder seqlen; do $$python plots/$$figure.py --gpu $(GPU) --out build/plots || exit 1; done; }

# --- the source --------------------------------------------------------------------------------------
.PHONY: format
format:  ## clang-format all sources
	clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu')

diff-%:
	@[ -n "$(call step_of,$*)" ] || { echo "make diff-$*: no such step; there are $(NUMBERS)" >&2; exit 2; }
	@git --no-pager diff --no-index --stat -p $(if $(filter 00,$*),/dev/null,steps/$(lastword \
		$(filter-out $(call step_of,$*) $(shell printf '%s\n' $(STEPS) | awk '$$0 > "$*"'),$(STEPS)))/attention.cu) \
		steps/$(call step_of,$*)/attention.cu || true

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

.PHONY: clean
clean:  ## remove everything that was built
	rm -rf build $(PROGRAMS)
