# SPDX-License-Identifier: MIT
# Every command of this book. `make help` prints the lines that begin with #?
# All cores work, and only one line a part is printed: make -j1 uses one core, make V=1 prints the commands.
ifeq ($(MAKELEVEL),0)
CORES := $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell getconf _NPROCESSORS_ONLN))
MAKEFLAGS += $(CORES) --no-print-directory
endif
CXX ?= g++
$(if $(strip $(CXX)),,$(error CXX is empty: CXX=g++ or CXX=clang++ names the compiler))
NVCC ?= $(shell command -v nvcc 2>/dev/null)
PYTHON ?= python3
CXXFLAGS ?= -O2 -g1
NVCCFLAGS ?= -O3 -lineinfo
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
	sed -nE '1s/^([0-9]+)\.([0-9]+)$$/\1\2/p')
# Without a GPU, programs are built for the emulator alone, unless ARCH says for which GPUs else.
FOR_GPU := $(and $(NVCC),$(or $(strip $(ARCH)),$(CAPABILITY)))
override ARCH := $(or $(strip $(ARCH)),sm_$(or $(CAPABILITY),80))
$(if $(shell echo '$(ARCH)' | grep -vxE 'sm_[0-9]+[af]?( +sm_[0-9]+[af]?)*'),\
	$(error ARCH=$(ARCH): sm_NN is allowed, as in ARCH=sm_90a, or several: ARCH="sm_80 sm_90"))
# GPU: the name of its results: "NVIDIA H200" becomes h200.
GPU ?= $(if $(CAPABILITY),$(shell nvidia-smi --query-gpu=name --format=csv,noheader | \
	sed -nE '1{s/^NVIDIA //; s/^GeForce //; s/ /-/g; p}' | tr A-Z a-z))
on_gpu = $(if $(and $(GPU),$(NVCC)),$(1))
comma := ,
BUILD := build/$(if $(FOR_GPU),cuda-$(subst $() $(),-,$(strip $(ARCH))),cpu)

# --- the steps -------------------------------------------------------------------------------------
SOURCES := $(sort $(wildcard steps/[0-9]*/attention.cu))
# The kernel that takes every problem: what the program poses before a step takes it.
ANY_PROBLEM := common/program/any-problem
# What the headers say, in one table: build/ladder.csv. It changes only if they do, so that what depends on it does
# not. LADDER has NAME:NEEDS:ARCH,ARCH of each.
read_header = awk -v arch="$(ARCH)" -f common/program/ladder.awk
LADDER := $(shell mkdir -p build && $(read_header) $(SOURCES) common/measure/ceilings.cu \
	steps/39-tile-counter/racecheck.cu $(ANY_PROBLEM)/attention.cu \
	>build/ladder.csv.$$PPID && { cmp -s build/ladder.csv.$$PPID build/ladder.csv || \
	mv build/ladder.csv.$$PPID build/ladder.csv; }; rm -f build/ladder.csv.$$PPID; \
	awk -F'"' '{ gsub(" ", ",", $$12); print $$2 ":" $$4 ":" $$12 }' build/ladder.csv)
needs_of = $(word 2,$(subst :, ,$(filter $(1):%,$(LADDER))))
archs_of = $(subst $(comma), ,$(word 3,$(subst :, ,$(filter $(1):%,$(LADDER)))))
number = $(firstword $(subst -, ,$(1)))
# make STEPS="05 36" ...: these alone.
ALL := $(SOURCES:steps/%/attention.cu=%)
# There is no step $(1): 5 is meant to be 05, and of others all are listed.
no_step = there is no step $(or $(1),without a number)$(if $(filter 0$(1)-%,$(ALL)),: write 0$(1),. The steps \
	are $(foreach s,$(ALL),$(call number,$(s))))
override STEPS := $(if $(filter command%,$(origin STEPS)),$(foreach n,$(STEPS),$(or \
	$(filter $(n) $(n)-%,$(ALL)),$(error STEPS=$(n): $(call no_step,$(n))))),$(ALL))
NUMBERS := $(foreach s,$(STEPS),$(call number,$(s)))
step_of = $(filter $(call number,$(1))-%,$(STEPS))
# What ARCH is too old for is built for the emulator.
TOO_NEW := $(if $(NVCC),$(foreach s,$(STEPS) ceilings racecheck,$(if $(call archs_of,$(s)),,$(s))))
# Part VII sends by NCCL: Debian's package libnccl-dev, the CUDA toolkit's folder, or the wheel nvidia-nccl-cu13.
NCCL := $(firstword $(wildcard $(addsuffix /nccl.h,/usr/include /usr/local/include $(dir $(NVCC))../include)))
# The wheel is a module whose folder has include/nccl.h and lib/libnccl.so.2.
NCCL_WHEEL := $(if $(NVCC),$(if $(NCCL),,$(patsubst %/include/nccl.h,%,$(wildcard $(addsuffix /include/nccl.h,$(shell \
	$(PYTHON) -c "import nvidia.nccl as nccl; print(nccl.__path__[0])" 2>/dev/null))))))
WITHOUT_NCCL := $(if $(NCCL)$(NCCL_WHEEL),,$(filter 7%,$(STEPS)))
nccl_there_is := NCCL (sudo apt-get install libnccl-dev, or pip install nvidia-nccl-cu13)
GPU_STEPS := $(filter-out $(TOO_NEW) $(WITHOUT_NCCL),$(STEPS))
PROGRAMS := $(foreach s,$(if $(FOR_GPU),$(GPU_STEPS),$(STEPS)),step-$(call number,$(s)))
EMULATED := $(filter-out $(PROGRAMS),$(NUMBERS:%=step-%))
# ./step-15-padded is steps/15-early-k/variants/padded.patch, applied to a copy of the step.
variants = $(patsubst steps/$(1)/variants/%.patch,step-$(call number,$(1))-%,$(wildcard steps/$(1)/variants/*.patch))
# ./step-06-try-4 is what a reader has made of step 06: try/06/4.cu.
TRIES := $(foreach f,$(wildcard try/*/*.cu),step-$(subst /,-try-,$(f:try/%.cu=%)))
VARIANTS := $(foreach s,$(STEPS),$(call variants,$(s))) $(TRIES)

# --- what cannot be made: one line says so, before anything is built --------------------------------
goals = $(filter $(1),$(MAKECMDGOALS))
refuse = $(error make $(1): $(2))
digits := 0 1 2 3 4 5 6 7 8 9
of_a_step := $(call goals,step-% debug-% diff-% variants-% sass-% try-% answer-% check- \
	$(foreach d,$(digits),check-$(d)%))
$(foreach g,$(of_a_step),$(if $(filter $(word 2,$(subst -, ,$(g))),$(NUMBERS)),,\
	$(call refuse,$(g),$(if $(filter $(word 2,$(subst -, ,$(g)))-%,$(ALL)),STEPS leaves it out,$(call \
	no_step,$(word 2,$(subst -, ,$(g))))))))
variants_of = $(patsubst step-$(1)-%,%,$(filter step-$(1)-%,$(VARIANTS)))
$(foreach g,$(filter-out $(NUMBERS:%=step-%) $(VARIANTS),$(call goals,step-%)),$(call refuse,$(g),step \
	$(word 2,$(subst -, ,$(g))) has no such variant$(if $(findstring -try-,$(g)), in try/). It has: \
	$(or $(call variants_of,$(word 2,$(subst -, ,$(g)))),none)))
$(foreach g,$(call goals,variants-%),$(if $(filter-out try-%,$(call variants_of,$(g:variants-%=%))),,\
	$(call refuse,$(g),step $(g:variants-%=%) has no variants)))
BENCHES := bench bench-models bench-hopper bench-decode bench-dims bench-backward bench-gpus bench-library \
	bench-library-backward
on_a_gpu := $(call goals,check-gpu check-gpus check-deadlock $(BENCHES) ceilings cycles sustained racecheck)
$(if $(GPU),,$(foreach g,$(on_a_gpu),$(call refuse,$(g),there is no GPU here (nvidia-smi finds none))))
$(if $(NVCC),,$(foreach g,$(on_a_gpu) $(call goals,regs sass-%),\
	$(call refuse,$(g),nvcc is not on the PATH; NVCC=/path/to/nvcc says where it is)))
$(if $(WITHOUT_NCCL),$(foreach g,$(call goals,check-gpus bench-gpus),$(call refuse,$(g),it needs $(nccl_there_is))))
$(foreach g,$(on_a_gpu) $(call goals,regs sass-%),$(if $(shell command -v $(firstword $(NVCC))),,\
	$(call refuse,$(g),NVCC=$(NVCC): there is no such program)))
# $(1) are goals that need $(2), which $(3) finds.
needs = $(foreach g,$(call goals,$(1)),$(if $(shell $(3) 2>&1 || echo no),$(call refuse,$(g),it needs $(2))))
$(call needs,diff-% variants-% $(filter-out $(TRIES),$(VARIANTS)),git: sudo apt-get install git,\
	git --version >/dev/null)
$(call needs,format,clang-format: sudo apt-get install clang-format,clang-format --version >/dev/null)
$(if $(SHAPES),,$(if $(filter-out $(STEPS),$(ALL)),$(foreach g,$(call goals,counters),\
	$(call refuse,$(g),STEPS needs SHAPES="OPTIONS; OPTIONS" here))))
$(if $(filter-out $(STEPS),$(ALL)),$(foreach g,$(call goals,docs check-docs test test-all tests),\
	$(call refuse,$(g),STEPS cannot be used here$(if $(findstring docs,$(g)),$(comma) because the pages quote all \
	steps,; STEPS_ONLY=06 chooses a step))))
$(call needs,plot,matplotlib: sudo apt-get install python3-matplotlib,$(PYTHON) -c "import matplotlib")

#? Build and run
#?   make step-02 && ./step-02   builds a step and runs it; ./step-02 --help lists its options
#?   make step-15-padded         builds a variant of a step: steps/15-early-k/variants/padded.patch
#?   make                        builds every step
#?   make debug-06               builds step 06 with its variables, and says how to stop one of its threads in gdb
#?   make diff-02                shows what step 02 changes in the step that it builds on
#?   make libattention.so        builds the library: steps/57-library/attention.h
#?   make client && ./client     builds a program that calls the library, and runs it: a model's block, token by token
#?   make train && ./train       builds a program that trains a small GPT with the library's gradients, and runs it
#?   make clean                  removes everything that was built
#?
#? Exercises
#?   make try-06                 writes the files to work in, one for each exercise of chapter 06: try/06
#?   make check-06               says which exercises are done, and what the others lack; WATCH=1 does so at each save
#?   make answer-06-2            explains the answer to the second exercise
#?   make step-06-try-4          builds try/06/4.cu as a program, which a GPU can time beside ./step-06
#?   make progress               lists what is done in all chapters
# The last steps first: they take longest.
reverse = $(if $(1),$(call reverse,$(wordlist 2,$(words $(1)),$(1))) $(firstword $(1)))
all: $(call reverse,$(PROGRAMS))
	@+$(if $(EMULATED),$(MAKE) $(EMULATED))
.DEFAULT: ; $(error make $@: there is no such command, and no such file; make help lists the commands)
help:
	@sed -nE 's/^#\? ?//p' Makefile
	@echo; echo "Now steps are built for $(built_for) by $(if $(FOR_GPU),$(NVCC) and )$(CXX)"
built_for = $(if $(FOR_GPU),the emulator and $(ARCH),the emulator)
clean: ; rm -rf build $(wildcard step-[0-9][0-9]*) libattention.so client train

# --- building --------------------------------------------------------------------------------------
# What the code cannot do without, before CXXFLAGS and NVCCFLAGS. (-fpeel-loops and the two after it: the
# emulator tells the copies apart that g++ makes of a short loop's iterations, Profile::mixed. -fPIC: the emulator
# is a part of libattention.so, too.)
HOST := $(CXX) -std=c++20 -fPIC -fno-semantic-interposition -Wall -Wextra -Wshadow \
	-Wno-unknown-pragmas -fstack-clash-protection \
	$(if $(findstring clang,$(CXX)),,-Wno-restrict -fpeel-loops -fno-tree-tail-merge \
	-fno-crossjumping) $(if $(WERROR),-Werror) -I. -Ibuild/host $(CXXFLAGS)
CUDA := $(NVCC) -std=c++20 -Xcompiler -Wall,-fPIC $(if $(WERROR),-Werror all-warnings) -I. $(NCCL_WHEEL:%=-I%/include) \
	$(NVCCFLAGS)
# With these passes of -O2 the emulator runs as fast, but for 2%, and compiles in two thirds of the time.
PASSES ?= -O1 -finline-small-functions -fstrict-aliasing -foptimize-sibling-calls
QUICK := $(if $(findstring clang,$(CXX)),$(HOST),$(HOST:-O2=$(PASSES)))
# A GPU may be newer than ARCH: PTX goes along (not for sm_90a and its like, which are one chip's). sm_86 and sm_89 are
# assembled from sm_80's PTX, which is made once: the machine code is the same.
virtual = $(patsubst sm_%,compute_%,$(patsubst sm_86,sm_80,$(patsubst sm_89,sm_80,$(1))))
codes_of = $(if $(filter %a,$(1)),,$(1)) $(foreach a,$(2),$(if $(filter $(1),$(call virtual,$(a))),$(a)))
gencode = $(foreach v,$(sort $(call virtual,$(1))),-gencode \
	arch=$(v)$(comma)code=[$(subst $() $(),$(comma),$(strip $(call codes_of,$(v),$(1))))])
# A recipe is: what it says, then $(call compile,COMMAND) or $(call link,COMMAND), in one line of the shell. They
# write beside the target and move it: neither an interrupt nor another make leaves half of a file.
silent = $(findstring s,$(filter-out --%,$(firstword -$(MAKEFLAGS))))
says = $(if $(V),,@$(if $(silent),,echo "  $(1)" &&)) mkdir -p $(@D) &&
link = $(1) -o $@.$$$$ && mv $@.$$$$ $@ || { rm -f $@.$$$$*; exit 1; }
compile = $(call link,$(1) -MMD -MP -MF $@.$$$$.dep -MT $@) && mv $@.$$$$.dep $@.d
sources = $(filter-out %_test.cpp $(2),$(wildcard $(1)/*.cpp))
objects = $(patsubst %,build/host/%.o,$(basename $(1)))
INTERFACE := $(call sources,common/program,%/program.cpp %/cpu_device.cpp %/no_gpu.cpp)
PAGES := $(call sources,common/pages,%/main.cpp)
# These folders are one object each: half of the time, because what they include is compiled once.
EMULATOR := build/host/common/emulator/all.o
REFERENCE := build/host/reference/all.o
OPTIONS := build/host/common/program/all.o
# What a step's object is linked with, for the emulator alone and for a GPU as well.
EMULATOR_ALONE := $(EMULATOR) $(REFERENCE) $(OPTIONS) \
	$(call objects,common/program/cpu_device.cpp common/program/program.cpp common/program/no_gpu.cpp)
PROGRAM_OBJECTS := $(if $(FOR_GPU),$(BUILD)/common/program/gpu_device.o $(BUILD)/common/program/sm_clock.o \
	$(BUILD)/common/program/forward.o \
	$(filter-out %/no_gpu.o,$(EMULATOR_ALONE)),$(EMULATOR_ALONE))
.DELETE_ON_ERROR:
.SECONDARY:
.SECONDEXPANSION:
.PHONY: all help clean tests some-tests test test-all check-gpu check-gpus check-deadlock check-bound check-docs truth \
	beside-tests $(BENCHES) counters ceilings racecheck cycles sustained regs bench-emulator docs plot format FORCE \
	$(PROGRAMS) $(EMULATED) $(VARIANTS)
EMULATED_VARIANTS := $(filter $(addsuffix -%,$(EMULATED)),$(VARIANTS))
$(PROGRAMS) $(filter-out $(EMULATED_VARIANTS),$(VARIANTS)): %: $(BUILD)/bin/%
	@ln -sf $< $@
emulated_as = ./step-$(1) is for the emulator$(if $(filter 7%,$(1)),$(comma) as ./step-$(1) --device cpu --gpus 4)
$(EMULATED) $(EMULATED_VARIANTS): step-%:
	@echo "step $* needs $(if $(filter $(TOO_NEW),$(call step_of,$*)),$(call needs_of,$(call step_of,$*))$(comma) and \
		ARCH is $(ARCH),$(nccl_there_is)): $(call emulated_as,$*)"
	@+$(MAKE) NVCC= $@
# The folder of 15, steps/15-early-k, or of 15-padded, build/variants/15-early-k/padded.
folder = $(if $(filter $(1),$(NUMBERS)),steps/$(call step_of,$(1)),$(patsubst \
	$(call number,$(1))-%,build/variants/$(call step_of,$(1))/%,$(1)))
LINK_NCCL = $(if $(NCCL_WHEEL),-L$(NCCL_WHEEL)/lib -l:libnccl.so.2 -Xlinker -rpath=$(NCCL_WHEEL)/lib,\
	-L$(dir $(NVCC))../lib -lnccl)
$(BUILD)/bin/step-%: build/host/$$(call folder,$$*)/attention.o \
		$(if $(FOR_GPU),$(BUILD)/$$(call folder,$$*)/attention.o) $(PROGRAM_OBJECTS)
	$(call says,./step-$* for $(built_for)) $(call link,$(if $(FOR_GPU),$(NVCC) -Xcompiler -pthread,$(CXX) -pthread) $^ \
		$(if $(FOR_GPU),$(if $(filter 7%,$*),$(LINK_NCCL))))
# For gdb: the kernel's variables as they are written, and the rest of the emulator as it always is.
DEBUGGED := $(HOST:-O2=-O0) -g3
build/debug/%/attention.o: %/attention.cu build/host/flags
	$(call says,$* for gdb) $(call compile,printf '%s\n' '#include <common/kernel/kernel.h>' \
		$(call macros,by_line) '#include "$<"' | $(DEBUGGED) -x c++ -c -)
build/debug/helpers.o: common/debug/helpers.cpp build/host/flags
	$(call says,$<) $(call compile,$(DEBUGGED) -c $<)
build/debug/bin/step-%: build/debug/$$(call folder,$$*)/attention.o build/debug/helpers.o $(EMULATOR_ALONE)
	$(call says,$@) $(call link,$(CXX) -pthread $^)
debug-%: build/debug/bin/step-%
	@sed 's/STEP/$*/g' common/debug/usage.txt
	@command -v gdb >/dev/null || echo "gdb is not installed here: sudo apt-get install gdb"
build/variants/%/attention.cu: steps/$$(*D)/variants/$$(*F).patch steps/$$(*D)/attention.cu \
		$$(wildcard steps/$$(*D)/variants/*.patch steps/$$(*D)/*.h) common/kernel/variant.sh
	@mkdir -p $(@D) && cd $(@D) && "$(CURDIR)/common/kernel/variant.sh" "$(CURDIR)/steps/$(*D)" $(*F) || \
		{ rm -f attention.cu; exit 1; }
build/variants/%/attention.cu: try/$$(call number,$$(*D))/$$(subst try-,,$$(*F)).cu
	@mkdir -p $(@D) && cp $< $@
build/host/%.o: %.cpp build/host/flags | build/host/ladder.inc
	$(call says,$<) $(call compile,$(QUICK) -c $<)
$(EMULATOR): $(call sources,common/emulator)
$(REFERENCE): $(call sources,reference)
# A quarter of a small run. Without these the reference takes twice as long.
$(REFERENCE): private QUICK += -ftree-vectorize -finline-functions -freorder-blocks-and-partition \
	-freorder-blocks-algorithm=stc -fschedule-insns2 -fpeephole2 -fexpensive-optimizations -fipa-ra -ftree-vrp
$(OPTIONS): $(INTERFACE)
# These take no part of a run's time that one could measure.
$(OPTIONS) $(call objects,common/program/cpu_device.cpp common/program/program.cpp): private QUICK = $(lightly)
build/host/%/all.o: build/host/flags | build/host/ladder.inc
	$(call says,$*) $(call compile,printf '#include "%s"\n' $(filter %.cpp,$^) | $(QUICK) -x c++ -c -)
$(BUILD)/%.o: %.cu $(BUILD)/flags
	$(call says,$< for $(ARCH)) $(call compile,$(CUDA) \
		$(call gencode,$(or $(patsubst sm_90,sm_90a,$(call archs_of,$(*F))),$(ARCH))) -c $<)
# Written anew only where they change, so that only then what depends on them is. ($$PPID: beside another make.)
changed = @mkdir -p $(@D) && if cmp -s $@.$$PPID $@; then rm $@.$$PPID; else mv $@.$$PPID $@; fi
# As the program includes it; what a step is compiled for is no matter of its own.
build/host/ladder.inc: build/ladder.csv
	@mkdir -p $(@D) && sed -nE '1!s/^(.*),"[^"]*"$$/{\1},/p' $< >$@.$$PPID
	$(changed)
quoted = '$(subst ','\'',$(1))'
# The compiler is tried first: one that is not there, or refuses the flags, makes no object old.
build/host/flags: FORCE
	@command -v $(firstword $(CXX)) >/dev/null || \
		{ echo "CXX=$(CXX): there is no such compiler; install g++" >&2; exit 2; }
	@mkdir -p $(@D) && echo | $(HOST) -dM -E -x c++ - >$@.$$PPID || { rm $@.$$PPID; exit 2; }
	@awk '{ is[$$2] = $$3 } END { exit is["__clang_major__"] ? is["__clang_major__"] < 16 : is["__GNUC__"] < 11 }' \
		$@.$$PPID || { rm $@.$$PPID; \
		echo "CXX=$(CXX) is too old: g++ 11 or later is needed, or clang 16 (std::source_location)" >&2; exit 2; }
	@[ -e $@ ] || echo "the first build takes 10 to 25 s on two cores, then each step 1 s$(if $(FOR_GPU), and nvcc's time)"
	@echo $(call quoted,$(filter-out -Werror,$(HOST))) >$@.$$PPID
	$(changed)
$(BUILD)/flags: FORCE
	@mkdir -p $(@D) && $(NVCC) --version >$@.$$PPID || { rm $@.$$PPID; exit 2; }
	@echo $(call quoted,$(CUDA)) >$@.$$PPID
	$(changed)
include common/kernel/kernel.mk common/testing/tests.mk steps/57-library/library.mk common/exercises/exercises.mk
-include $(shell find build/host $(BUILD) -path "*/without-*" -prune -o -name '*.d' -print 2>/dev/null)

#?
#? Check
#?   make test                   what a change breaks most often, in about two minutes on two cores
#?   make test-all               all tests that need no GPU
#?   make check-gpu              every step on the GPU, over the tests' shapes and inputs, sanitized; or STEPS="36 37"
#?   make check-gpus             Part VII alone, on two GPUs and more
#?   make check-deadlock         of it that alone: what waits for ever ends with an error
#?   make check-bound            every step with thousands of seeds and shapes; an hour or more
#?   make check-docs             fail if a number, a table or a quote of a page is stale; a minute, for it runs them
#?   make check-flash-attn FLASH_ATTENTION=PATH   FlashAttention's own tests, of a checkout, over the library
#?   make check-transformers     a Llama with random weights generates with the library, beside PyTorch's attention
#?   make truth                  the emulator's counts against ncu's
build/host/bin/tests: $(call objects,$(wildcard common/*/*_test.cpp reference/*_test.cpp steps/*_test.cpp \
		steps/*/*_test.cpp) $(patsubst %,common/testing/%.cpp,copies jobs test_main) \
		$(PAGES)) $(TESTING) $(EXERCISES) $(EMULATOR) $(REFERENCE) $(OPTIONS)
	$(call says,the tests) $(call link,$(CXX) -pthread $^)
DOCUMENTS := README.md plots/README.md $(wildcard common/emulator/*.md steps/*.md steps/*/README.md)
QUOTED := $(sort $(shell sed -nE 's|^ *<!-- output: \./(step-[-a-z0-9]+) .*|\1|p' $(DOCUMENTS)))
build/host/bin/docs: $(call objects,$(PAGES) common/pages/main.cpp) $(TESTING) $(EMULATOR) $(REFERENCE) $(OPTIONS)
	$(call says,$@) $(call link,$(CXX) -pthread $^)
# For a GPU the tests need step 15, step 30 and what was built for it before; the others are built for the emulator
# alone: nothing here runs them on a GPU, and nvcc would take most of the time. `make check-gpu` needs all.
BUILT_BEFORE := $(notdir $(wildcard $(BUILD)/bin/step-*))
FOR_TEST := $(if $(FOR_GPU),$(filter step-15 step-30 $(BUILT_BEFORE),$(PROGRAMS)),$(PROGRAMS))
FOR_EMULATOR := $(filter-out $(FOR_TEST),$(NUMBERS:%=step-%))
BESIDE_TESTS := build/host/common/program/no_gpu.o \
	$(addprefix build/host/bin/,tests docs exercises libattention.so client train)
beside-tests: $(BESIDE_TESTS) ; @:
tests some-tests:
	@CXX="$(CXX) $(CXXFLAGS)" common/testing/doctest.sh
	@echo "building the steps for $(built_for), and the tests"
	@+$(MAKE) $(if $(filter tests,$@),all,$(call reverse,$(FOR_TEST))) beside-tests
	@+$(if $(and $(filter some-tests,$@),$(FOR_EMULATOR)),$(MAKE) NVCC= $(FOR_EMULATOR))
# Options of doctest, or a test's name.
chosen_tests = $(if $(filter -%,$(TESTS)),$(TESTS),$(if $(TESTS),$(call quoted,$(TESTS))))
test: some-tests ; @CXX="$(CXX)" TESTS_SOME=1 build/host/bin/tests $(chosen_tests)
test-all: some-tests ; @CXX="$(CXX)" build/host/bin/tests $(chosen_tests)
$(BUILD)/bin/any-problem: build/host/$(ANY_PROBLEM)/attention.o $(BUILD)/$(ANY_PROBLEM)/attention.o $(PROGRAM_OBJECTS)
	$(call says,$@) $(call link,$(NVCC) -Xcompiler -pthread $^)
# What racecheck can follow: variants in which each lane arrives at a barrier.
FOLLOWED := $(filter %-each-arrives,$(filter-out $(EMULATED_VARIANTS),$(VARIANTS)))
check-gpu: $(call on_gpu,tests $(BUILD)/bin/any-problem $(FOLLOWED))
	@ANY_PROBLEM=$(BUILD)/bin/any-problem $(call measure,check-gpu.sh) build/host/bin/tests $(NUMBERS)
check-gpus: ; @+$(MAKE) STEPS="$(filter 7%,$(NUMBERS))" check-gpu
check-deadlock: ; @$(call measure,deadlock.sh)
check-bound: tests ; @BOUND_RUNS=$${BOUND_RUNS:-2000} build/host/bin/tests --test-suite=bound
check-docs: build/host/bin/docs $(QUOTED) train-quoted
	@build/host/bin/docs --check $(DOCUMENTS) && echo "$(words $(DOCUMENTS)) pages are up to date"
truth: ; @common/measure/truth.sh $(or $(GPU:%=plots/results/%-counters.csv),plots/results/*-counters.csv)

#?
#? Measure, into plots/results
#?   make bench                  times Parts I and II and PyTorch's attention on this GPU, in alternating rounds
#?   make bench-models           times the problems of Part III
#?   make bench-hopper           times Part IV, and FlashAttention-3 where fa3-fwd is installed
#?   make bench-decode           times decoding: a query per head and a long cache
#?   make bench-dims             times step 56 at head dims 64 to 256
#?   make bench-backward         times Part VI but step 87, and the backward passes of PyTorch
#?   make bench-gpus             times Part VII on two GPUs and on one, or on GPUS=4
#?   make bench-training         trains a GPT on a megabyte of text, with PyTorch's attention and with libattention.so
#?   make training               trains the small GPT of chapter 69 on the emulator, in bf16 and fp16: a minute
#?   make bench-library          times libattention.so with Hopper's kernels and without, beside FlashAttention-3
#?   make bench-library-backward   times its backward pass: Hopper's kernel, with and without the same bits in every
#?                               run, that of mma.sync, and PyTorch's
#?   make variants-15            alternates step 15 and its variants; without a GPU, checks and counts them
#?   make cycles                 SM clocks, time, clock rate, power of each step and variant but Part VII's;
#?                               STEPS="05 06" adds these to the file, SHAPES="--batch 4; --causal" the steps side by
#?                               side at these problems
#?   make sustained              the speed that lasts: each kernel and its peers alone for 3 seconds, with clock rate
#?                               and power; STEPS= and SHAPES= as above
#?   make counters               counts on the emulator and, with a GPU and ncu, measures the same
#?   make counters STEPS="05 36" SHAPES="--batch 3 --heads 1; --causal"
#?                               counts these steps and problems alone
#?   make ceilings               measures what this GPU can do at most
#?   make racecheck              shows what compute-sanitizer's racecheck sees of step 39's barriers
#?   make regs                   lists registers, shared memory, occupancy and spills of each kernel (needs nvcc alone)
#?   make sass-15                lists the machine code of step 15 and its loops (needs nvcc alone)
#?   make bench-emulator         times the emulator, checking only and counting
# (A make in a script has no part in this make's jobs, and builds for a GPU only where this one does.)
measure = GPU="$(GPU)" NVCC="$(NVCC)" ARCH="$(firstword $(ARCH))" FOR_GPU="$(FOR_GPU)" PYTHON="$(PYTHON)" \
	BUILD="$(BUILD)" SHAPES="$(SHAPES)" MAKEFLAGS="$(filter-out -j% --jobserver%,$(MAKEFLAGS))" common/measure/$(1)
$(BUILD)/sm_clock.so: $(BUILD)/common/program/sm_clock.o
	$(call says,$@) $(call link,$(NVCC) -shared $^)
# Part IV, the steps from 30 on, has results of its own, which begin at step 15; so have Part VI, steps 60 to 69, 80,
# 81, 87 and 88, and Part VII. (The other steps from 82 on are Part V's, and have clocks alone.)
OWN_RESULTS := 3% 4% 6% 7% 8%
bench bench-models: $(call on_gpu,$(filter-out $(OWN_RESULTS:%=step-%),$(PROGRAMS)) $(BUILD)/sm_clock.so)
	@$(call measure,$@.sh) $(filter-out $(OWN_RESULTS),$(GPU_STEPS))
bench-hopper: $(call on_gpu,$(filter step-15 step-3% step-4%,$(PROGRAMS)) $(BUILD)/sm_clock.so)
	@$(call measure,$@.sh) $(filter 15-% 3% 4%,$(GPU_STEPS))
bench-gpus: $(call on_gpu,$(filter step-7%,$(PROGRAMS)))
	@GPUS="$(GPUS)" $(call measure,$@.sh) $(filter 7%,$(GPU_STEPS))
bench-decode: $(call on_gpu,$(filter step-27 step-5%,$(PROGRAMS)) $(BUILD)/sm_clock.so)
	@$(call measure,$@.sh) $(filter 27-% 5%,$(GPU_STEPS))
bench-dims: $(call on_gpu,$(filter step-56,$(PROGRAMS)) $(BUILD)/sm_clock.so)
	@$(call measure,$@.sh) $(filter 56-%,$(GPU_STEPS))
bench-backward: $(call on_gpu,$(filter step-6% step-80 step-81 step-88 step-9%,$(PROGRAMS)) $(BUILD)/sm_clock.so)
	@$(call measure,$@.sh) $(filter 6% 80-% 81-% 88-% 9%,$(GPU_STEPS))
bench-library: $(call on_gpu,libattention.so step-57 $(BUILD)/sm_clock.so)
	@LIBATTENTION=./libattention.so $(PYTHON) common/measure/library.py --clocks $(BUILD)/sm_clock.so \
		plots/results/$(GPU)-library.csv
bench-library-backward: $(call on_gpu,libattention.so $(BUILD)/sm_clock.so)
	@LIBATTENTION=./libattention.so $(PYTHON) common/measure/library.py --backward --clocks $(BUILD)/sm_clock.so \
		plots/results/$(GPU)-library-backward.csv
variants-%: step-% $$(call variants,$$(call step_of,$$*))
	@$(call measure,variants.sh) $*$(patsubst step-$*-%, %,$(call variants,$(call step_of,$*)))
counters: all
	@$(call measure,counters.sh) $(STEPS)
$(BUILD)/bin/ceilings: $(BUILD)/common/measure/ceilings.o
	$(call says,$@) $(call link,$(NVCC) $^)
ceilings: $(if $(filter ceilings,$(TOO_NEW)),,$(call on_gpu,$(BUILD)/bin/ceilings)) ; @$(call measure,ceilings.sh)
$(BUILD)/bin/racecheck: $(BUILD)/steps/39-tile-counter/racecheck.o
	$(call says,$@) $(call link,$(NVCC) $^)
racecheck: $(if $(filter racecheck,$(TOO_NEW)),,$(call on_gpu,$(BUILD)/bin/racecheck))
	@$(call measure,racecheck.sh)
cycles: $(call on_gpu,$(PROGRAMS) $(filter-out $(TRIES) $(EMULATED_VARIANTS),$(VARIANTS)))
	@$(call measure,cycles.sh) $(filter-out 7%,$(GPU_STEPS))
sustained: $(call on_gpu,$(PROGRAMS) $(BUILD)/bin/ceilings $(BUILD)/sm_clock.so)
	@$(call measure,sustained.sh) $(filter-out 7%,$(GPU_STEPS))
regs: ; @$(call measure,regs.sh) $(GPU_STEPS)
sass-%: FORCE ; @$(call measure,sass.sh) $*
bench-emulator: all ; @common/measure/bench-emulator.sh $(NUMBERS)

#?
#? Write
#?   make docs                   writes the measured numbers into the pages
#?   make plot                   draws the figures from plots/results; those of your own GPU go to build/plots
#?   make compile_commands.json  writes what clangd needs, to complete and check in an editor
#?   make format                 formats all C++ and CUDA sources
#?
#? Variables
#?   NVCC=/path/to/nvcc          the CUDA compiler; NVCC= builds for the emulator alone
#?   ARCH="sm_80 sm_90"          the GPUs to compile for; without it, the one in this machine
#?   CXX=clang++                 the host's compiler: g++ 11 or later, or clang 16 or later
#?   V=1                         prints the commands that build
#?   TESTS='*bank conflicts*'    of make test, the tests with this name
#?   STEPS_ONLY=06               of make test, the work of step 06 alone; 3: of steps 30 to 39
docs: build/host/bin/docs $(QUOTED) train-quoted ; @build/host/bin/docs $(DOCUMENTS)
plot: ; @GPU="$(GPU)" PYTHON="$(PYTHON)" plots/plot.sh
# As the emulator's build compiles them, but for flags that clang does not know. clangd reads a header as the
# source beside it that it finds first.
as_clang = "clang++", "-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-Wno-unknown-pragmas", "-I.", "-Ibuild/host", \
	"-include", "common/emulator/clangd.h", "-x", "c++"
by_json = , "-D$(1)=\"$(2)\""
entry = {"directory": "$(CURDIR)", "file": "$(1)", "arguments": [$(as_clang)$(2), "$(1)"]}
compile_commands.json: build/host/ladder.inc FORCE
	$(file >$@,[)$(foreach s,$(wildcard common/*/*.cpp reference/*.cpp steps/*.cpp steps/*/*.cpp),\
		$(file >>$@,$(call entry,$(s))$(comma)))\
	$(foreach s,$(filter-out %/attention.cu %/racecheck.cu,$(wildcard steps/*/*.cu)),$(file \
		>>$@,$(call entry,$(s))$(comma)))\
	$(foreach s,$(STEPS:%=steps/%) $(ANY_PROBLEM),$(file >>$@,$(call entry,$(s)/attention.cu,$(call \
		by_json,STEP_NAME,$(notdir $(s)))$(call by_json,STEP_NEEDS,$(call needs_of,$(notdir $(s))))$(call \
		by_json,STEP_TAKES,))$(comma)))\
	$(file >>$@,$(call entry,common/kernel/kernel.h)])
	@echo "written: $@"
format: ; @clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu')
diff-%: FORCE ; @common/measure/diff.sh $*
