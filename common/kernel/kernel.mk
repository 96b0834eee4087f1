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
# so it runs as fast as with -O2 but for a tenth, and compiles in less than half of the time.
# kernel.h and what it includes are half of the compilation of most steps: precompiled. g++ takes that only if
# no macro is new before it, so a step's come after it, in a file that it reads from a pipe; and only once, so
# the next to include it gets another header of the same name.
PRECOMPILED := build/host/precompiled/common/kernel/kernel.h.gch
$(PRECOMPILED): common/kernel/kernel.h build/host/flags
	$(call says,$<) echo '#include_next <$<>' >$(@:.gch=).$$$$ && mv $(@:.gch=).$$$$ $(@:.gch=) && \
		$(call compile,$(subst -O2,-Og,$(HOST)) -w -x c++-header $<)
build/host/%/attention.o: %/attention.cu $(PRECOMPILED)
	$(call says,$*) $(call compile,printf '%s\n' '#include <common/kernel/kernel.h>' $(call macros,by_line) \
		'#include "$<"' | $(subst -O2,-Og,$(HOST:-I.=-Ibuild/host/precompiled -I.)) -x c++ -c -)
$(BUILD)/%/attention.o: %/attention.cu $(BUILD)/flags
	$(call says,$* for $(ARCH)) $(call compile,$(CUDA) \
		$(call gencode,$(or $(call header,12),$(needs))) \
		$(call macros,by_flag) -c $<)
