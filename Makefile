# Every command of this book. `make help` lists them.

# --- the machine -----------------------------------------------------------------------------------
# CXX   the host's compiler, C++20
# NVCC  the CUDA compiler; empty: emulator only
# ARCH  the GPU to compile for: sm_80, sm_90a, ...; left out, the one in this machine
CXX ?= g++
NVCC ?= $(shell command -v nvcc 2>/dev/null)
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
ARCH ?= sm_$(or $(filter-out %error% %failed%,$(CAPABILITY)),80)
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

# What a test links with its own copy of a step: the emulator alone, on any machine.
.PHONY: emulator-objects
emulator-objects: $(PROGRAM_OBJECTS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

.PHONY: diff-%
diff-%:
	@git --no-pager diff --no-index --stat -p $(if $(filter 00,$*),/dev/null,steps/$(lastword \
		$(filter-out $(call step_of,$*) $(shell printf '%s\n' $(STEPS) | awk '$$0 > "$*"'),$(STEPS)))/attention.cu) \
		steps/$(call step_of,$*)/attention.cu || true

.PHONY: clean
clean:  ## remove everything that was built
	rm -rf build $(PROGRAMS)
