# Every command of this book. `make help` lists them.

# --- the machine -----------------------------------------------------------------------------------
# CXX   the host's compiler, C++20
# NVCC  the CUDA compiler; empty: emulator only
# ARCH  the GPUs to compile for: sm_80, sm_90a, "sm_80 sm_89"; left out, the one in this machine
CXX ?= g++
NVCC ?= $(shell command -v nvcc 2>/dev/null)
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
	sed -nE '1s/^([0-9]+)\.([0-9]+)$$/\1\2/p')
ARCH ?= sm_$(or $(CAPABILITY),80)
WERROR ?=

comma := ,
space := $() $()
BUILD := build/$(if $(NVCC),cuda-$(subst $(space),-,$(strip $(ARCH))),cpu)
STEPS := $(sort $(notdir $(wildcard steps/[0-9]*)))
NUMBERS := $(foreach s,$(STEPS),$(word 1,$(subst -, ,$(s))))
step_of = $(filter $(1)-%,$(STEPS))

# The steps of the CUDA cores run on what nvcc compiles for; the others need sm_80 for cp.async and
# for mma.m16n8k16 (PTX ISA, 'Target ISA Notes' of both). LEFT_OUT: those that ARCH is too old for.
CUDA_CORE_STEPS := 00 01 02 03 04
NEEDS := sm_80 or later (cp.async, mma.m16n8k16)
TOO_OLD := $(and $(NVCC),$(firstword $(filter sm_5% sm_6% sm_7%,$(ARCH))))
LEFT_OUT := $(if $(TOO_OLD),$(filter-out $(CUDA_CORE_STEPS),$(NUMBERS)))
OTHERS_RUN := steps $(firstword $(CUDA_CORE_STEPS)) to $(lastword $(CUDA_CORE_STEPS)) run on $(TOO_OLD)
GPU_NUMBERS := $(filter-out $(LEFT_OUT),$(NUMBERS))
GPU_STEPS := $(foreach n,$(GPU_NUMBERS),$(call step_of,$(n)))
PROGRAMS := $(addprefix step-,$(GPU_NUMBERS))

CXXFLAGS := -std=c++20 -O2 -g -Wall -Wextra -Wshadow -Wno-unknown-pragmas -Wno-restrict \
	$(if $(WERROR),-Werror) -MMD -MP -I.
# A GPU may be newer than ARCH: PTX goes along (not for sm_90a and its like, which are one chip's).
GENCODE := $(foreach a,$(ARCH),-gencode \
	arch=$(a:sm_%=compute_%),code=$(if $(filter %a,$(a)),$(a),[$(a:sm_%=compute_%)$(comma)$(a)]))
NVCCFLAGS := -std=c++20 -O3 -lineinfo $(GENCODE) -Xcompiler -Wall \
	$(if $(WERROR),-Werror all-warnings) -MMD -MP -I.

EMULATOR := block counters fiber memory runtime sites
PROGRAM_OBJECTS := $(addprefix $(BUILD)/common/program/,program.o options.o csv.o) \
	$(addprefix $(BUILD)/common/emulator/,$(addsuffix .o,$(EMULATOR) device)) \
	$(addprefix $(BUILD)/reference/,attention.o inputs.o verdict.o) \
	$(if $(NVCC),$(BUILD)/common/program/gpu_device.o)
$(BUILD)/common/emulator/device.o: CXXFLAGS += $(if $(NVCC),-DHAVE_CUDA)

.PHONY: all
all: $(PROGRAMS)  ## build every step
	@$(if $(LEFT_OUT),echo "left out: steps $(firstword $(LEFT_OUT)) to $(lastword $(LEFT_OUT))" \
		"need $(NEEDS); $(OTHERS_RUN)")

# The steps that ARCH is too old for come along, for the emulator.
.PHONY: every-step
every-step: $(PROGRAMS)
	@+$(if $(LEFT_OUT),$(MAKE) --no-print-directory NVCC= $(LEFT_OUT:%=step-%))

.PHONY: help
help:  ## list the commands
	@echo "make step-02 && ./step-02     build one step and run it; ./step-02 --help"
	@echo "make diff-02                  what step 02 changes in the step that it builds on"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
		awk -F'\t' '{printf "make %-24s %s\n", $$1, $$2}'
	@echo
	@echo "NVCC=/path/to/nvcc            use this CUDA compiler; NVCC= builds for the emulator only"
	@echo "ARCH=sm_90                    compile for this GPU; now: $(if $(NVCC),$(ARCH),no nvcc found)"

# --- building ----------------------------------------------------------------------------------------
.SECONDARY:
.SECONDEXPANSION:
.PHONY: $(PROGRAMS) $(LEFT_OUT:%=step-%)
$(PROGRAMS): %: $(BUILD)/bin/%
	@ln -sf $< $@

$(LEFT_OUT:%=step-%): step-%:
	@echo "step $* needs $(NEEDS); $(OTHERS_RUN)" >&2; exit 2

# For a look at what nvcc says, without linking.
.PHONY: gpu-objects
gpu-objects: $(GPU_STEPS:%=$(BUILD)/steps/%.gpu.o)

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
TEST_OBJECTS := $(TEST_SOURCES:%.cpp=$(BUILD)/%.o) $(BUILD)/common/testing/test_main.o $(BUILD)/common/testing/process.o \
	$(BUILD)/common/program/options.o $(BUILD)/common/program/csv.o $(BUILD)/common/pages/docs.o $(BUILD)/common/pages/values.o \
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
	@+$(MAKE) --no-print-directory every-step $(BUILD)/bin/tests $(BUILD)/bin/docs
	@+$(MAKE) --no-print-directory NVCC= emulator-objects
	@$(BUILD)/bin/tests $(TESTS)

# SANITIZE= leaves compute-sanitizer out.
SANITIZE ?= $(if $(shell command -v compute-sanitizer 2>/dev/null),memcheck racecheck initcheck synccheck)
.PHONY: check-gpu
check-gpu: doctest  ## run every step over the tests' shapes and inputs on the GPU, sanitized
	@+$(MAKE) --no-print-directory every-step $(BUILD)/bin/tests
	@STEPS_DEVICE=gpu $(BUILD)/bin/tests --test-suite=steps
	@[ -n "$(SANITIZE)" ] || echo "SKIP: compute-sanitizer is not installed"
	@for tool in $(SANITIZE); do echo "compute-sanitizer --tool $$tool"; \
		STEPS_DEVICE=gpu STEPS_PREFIX="compute-sanitizer --tool $$tool --error-exitcode 9" \
		$(BUILD)/bin/tests --test-suite=steps || exit 1; done

.PHONY: bench-emulator
bench-emulator: every-step  ## time the emulator, checking only and counting
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

.PHONY: bench
bench: $(and $(GPU),$(NVCC),$(PROGRAMS))  ## measure every step and PyTorch's attention on this GPU, interleaved
	@[ -n "$(GPU)" ] || { echo "make bench: no GPU here" >&2; exit 3; }
	@[ -n "$(NVCC)" ] || { echo "make bench: nvcc is not on the PATH" >&2; exit 3; }
	@rm -f build/bench.csv
	@PYTHON="$(PYTHON)" common/measure/bench.sh build/bench.csv $(REPEAT) $(GPU_NUMBERS)
	@mv build/bench.csv $(RESULTS)/$(GPU).csv
	@{ nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv; \
		$(NVCC) --version | tail -2; \
		$(PYTHON) -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null || :; } > $(RESULTS)/$(GPU).txt
	@echo "written: $(RESULTS)/$(GPU).csv; 'make plot' draws it"

$(BUILD)/bin/ceilings: $(BUILD)/common/measure/ceilings.o
	@mkdir -p $(@D)
	$(NVCC) $^ -o $@

.PHONY: ceilings
ceilings: $(if $(TOO_OLD),,$(and $(GPU),$(NVCC),$(BUILD)/bin/ceilings))  ## measure what this GPU can do at most
	@[ -n "$(GPU)" ] || { echo "make ceilings: no GPU here" >&2; exit 3; }
	@[ -n "$(NVCC)" ] || { echo "make ceilings: nvcc is not on the PATH" >&2; exit 3; }
	@[ -z "$(TOO_OLD)" ] || { echo "make ceilings: mma.m16n8k16 needs sm_80 or later, not $(TOO_OLD)" >&2; exit 3; }
	@$(BUILD)/bin/ceilings --csv build/ceilings.csv
	@mv build/ceilings.csv $(RESULTS)/$(GPU)-ceilings.csv
	@echo "written: $(RESULTS)/$(GPU)-ceilings.csv"

# One shape for the counters, small enough for the emulator; one for the HBM traffic, whose scores and
# outputs are far larger than the L2 cache.
COUNTED := batch=1 heads=2 seqlen=512 head_dim=128
LARGE := batch=4 heads=16 seqlen=4096 head_dim=128
shape_options = $(foreach s,$(1),--$(subst _,-,$(subst =, ,$(s))))
awk_variables = $(foreach s,$(1),-v $(s))
METRICS := $(shell sed -nE 's/^ *name\["([^"]+_(ld|st|shared|hmma\.)[^"]*|[^"]*shared_ideal)"\].*/\1/p' common/measure/ncu.awk | paste -sd,)
HBM_METRICS := dram__bytes_read.sum,dram__bytes_write.sum,$(shell echo $(METRICS) | tr , '\n' | grep t_sectors | paste -sd,)
STALL_REASONS := selected not_selected dispatch_stall short_scoreboard long_scoreboard wait mio_throttle math_pipe_throttle barrier
STALL_METRICS := $(subst $(space),$(comma),smsp__issue_active.avg.pct_of_peak_sustained_active smsp__inst_executed.sum \
	sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active \
	sm__warps_active.avg.per_cycle_active l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed \
	$(STALL_REASONS:%=smsp__average_warps_issue_stalled_%_per_issue_active.ratio))
# measure FILE METRICS SHAPE: appends what ncu measures of each step in turn
define measure
	for step in $(GPU_STEPS); do echo "ncu $$step $(3)"; \
		ncu --clock-control none --metrics $(2) --csv ./step-$${step%%-*} --device gpu --check-only \
			$(call shape_options,$(3)) > build/ncu.txt || { tail -3 build/ncu.txt; exit 1; }; \
		awk -f common/measure/ncu.awk -v step=$$step $(call awk_variables,$(3)) build/ncu.txt | sort >> $(1); done
endef

# trace NN OPTIONS: what the bank maps are drawn from
trace = ./step-$(1) --device cpu $(2) --trace-csv $(RESULTS)/trace-$(call step_of,$(1)).csv >/dev/null

.PHONY: counters
counters: every-step  ## count on the emulator and, where there is a GPU and ncu, measure beside it
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
	@$(call trace,02) && $(call trace,03) && $(call trace,05,--head-dim 128) && $(call trace,06,--head-dim 128)

# For the first of ARCH, if there are several.
.PHONY: regs
regs:  ## print registers, shared memory, occupancy and spills of every kernel
	@[ -n "$(NVCC)" ] || { echo "make regs: nvcc is not on the PATH" >&2; exit 3; }
	@rm -rf build/regs && mkdir -p build/regs
	@for step in $(GPU_STEPS); do \
		$(NVCC) -std=c++20 -O3 -I. -arch=$(patsubst sm_%,compute_%,$(firstword $(ARCH))) -DSTEP_NAME='"x"' \
			-ptx steps/$$step/attention.cu -o build/regs/ptx && \
		$(dir $(NVCC))ptxas -v -arch=$(firstword $(ARCH)) build/regs/ptx -o build/regs/cubin >build/regs/log 2>&1 || \
			{ cat build/regs/log; exit 1; }; \
		cat build/regs/ptx build/regs/log | c++filt -p >build/regs/$$step.txt; done
	@awk -f common/measure/regs.awk -v arch=$(firstword $(ARCH)) build/regs/*.txt

# --- figures and tables ------------------------------------------------------------------------------
FIGURES := $(filter-out style peers,$(basename $(notdir $(wildcard plots/*.py))))
DOCUMENTS := README.md common/emulator/TRUTH.md $(wildcard steps/*/README.md)
# The steps whose output the pages quote.
QUOTED := $(sort $(shell sed -nE 's|^ *<!-- output: \./(step-[0-9]+) .*|\1|p' $(DOCUMENTS)))

$(BUILD)/bin/docs: $(addprefix $(BUILD)/common/pages/,docs.o values.o main.o)
	@mkdir -p $(@D)
	$(CXX) $^ -o $@

.PHONY: docs
docs: $(BUILD)/bin/docs $(QUOTED)  ## write the measured numbers into README.md and the chapters
	$(BUILD)/bin/docs $(DOCUMENTS)

.PHONY: check-docs
check-docs: $(BUILD)/bin/docs $(QUOTED)  ## fail if a number, a table or a quote is stale
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
	for figure in $(FIGURES) "seqlen --head-dim 64"; do set -- $$figure; name=$$1; shift; \
		$$python plots/$$name.py "$$@" || exit 1; done; \
	[ "$(GPU)" = h200 ] || [ ! -f $(RESULTS)/$(GPU).csv ] || { mkdir -p build/plots; \
		for figure in ladder seqlen memory_wall hbm_bytes three_algorithms; do $$python plots/$$figure.py --gpu $(GPU) --out build/plots || exit 1; done; }

# --- the source --------------------------------------------------------------------------------------
.PHONY: format
format:  ## clang-format all sources
	clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu')

# Against the step that the header's 'Before' names: not always the one before, some are dead ends.
diff-%:
	@[ -n "$(call step_of,$*)" ] || { echo "make diff-$*: no such step; there are $(NUMBERS)" >&2; exit 2; }
	@to=steps/$(call step_of,$*)/attention.cu; \
	before=$$(sed -nE 's|^// Before +step ([0-9]{2}).*|\1|p' $$to | head -1); \
	: $${before:=$$(printf '%s\n' $(NUMBERS) | awk '$$0 < "$*"' | tail -1)}; \
	from=$$(ls steps/$${before:-none}-*/attention.cu 2>/dev/null) || from=/dev/null; \
	echo "step $* against $${before:+step }$${before:-nothing}"; \
	git --no-pager diff --no-index --stat -p $$from $$to || true

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

.PHONY: clean
clean:  ## remove everything that was built
	rm -rf build $(PROGRAMS)
