# SPDX-License-Identifier: MIT
# How a step becomes an object, for the emulator and for GPUs; the Makefile includes this.
# Of $*, steps/15-early-k or build/variants/15-early-k/padded, the label.
label = $(subst /,:,$(patsubst build/variants/%,%,$(patsubst common/program/%,%,$(*:steps/%=%))))
# What the source's header says, a variant's its own: 4 is 'needs' of build/ladder.csv, 8 'takes', 12 'archs'.
header = $(shell $(read_header) $< | sed -n 2p | cut -d'"' -f$(1))
needs = $(or $(call header,4),$(error $<: its header needs a line '// Needs       sm_NN'))
# The macros that a source reads of itself: $(1) makes one of a name and a value.
macros = $(call $(1),STEP_NAME,$(label)) $(call $(1),STEP_NEEDS,$(needs)) $(call $(1),STEP_TAKES,$(call header,8))
by_flag = -D$(1)='"$(2)"'
by_line = '\#define $(1) "$(2)"'
# For the emulator with -Og, unless CXXFLAGS has another -O: most of what a kernel does there is the emulator's code,
# so it runs as fast as with -O2 but for a tenth, and compiles in less than half of the time. Steps that have many
# kernels, of each type, head dim and mask, with -O0: they compile in a fifth of that, and run as fast but for a sixth.
# (Not in a program for a GPU: -O0 inlines nothing, and of two functions with one name the linker keeps one.)
of_many_kernels = $(if $(FOR_GPU),,$(filter 29-% 43-% 44-% 45-% 46-% 5%,$(label)))
quickly = $(subst -O2,-O0,$(HOST))
lightly = $(subst -O2,-Og,$(HOST))
# kernel.h and what it includes are half of the compilation of most steps: precompiled. g++ takes that only if
# no macro is new before it, so a step's come after it, in a file that it reads from a pipe; and only once, so
# the next to include it gets another header of the same name.
precompiled = build/host/precompiled/$(1)/common/kernel/kernel.h.gch
$(call precompiled,quickly) $(call precompiled,lightly): build/host/precompiled/%/common/kernel/kernel.h.gch: \
		common/kernel/kernel.h build/host/flags
	$(call says,$< $*) echo '#include_next <$<>' >$(@:.gch=).$$$$ && mv $(@:.gch=).$$$$ $(@:.gch=) && \
		$(call compile,$($*) -w -x c++-header $<)
how = $(if $(of_many_kernels),quickly,lightly)
build/host/%/attention.o: %/attention.cu $$(call precompiled,$$(how))
	$(call says,$*) $(call compile,printf '%s\n' '#include <common/kernel/kernel.h>' $(call macros,by_line) \
		'#include "$<"' | $(subst -I.,-Ibuild/host/precompiled/$(how) -I.,$($(how))) -x c++ -c -)
$(BUILD)/%/attention.o: %/attention.cu $(BUILD)/flags
	$(call says,$* for $(ARCH)) $(call compile,$(CUDA) \
		$(call gencode,$(or $(call header,12),$(needs))) \
		$(call macros,by_flag) -c $<)
