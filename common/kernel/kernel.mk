# How a step becomes an object, for the emulator and for GPUs; the Makefile includes this.
# Of $*, steps/15-early-k or build/variants/15-early-k/padded: the label, and the step that it is of.
label = $(subst /,:,$(patsubst build/variants/%,%,$(patsubst common/program/%,%,$(*:steps/%=%))))
step = $(firstword $(subst :, ,$(label)))
# What it needs: a variant may need more than its step.
needs = $(or $(shell sed -nE 's|^// Needs +(sm_[0-9]+a?).*|\1|p' $<),$(call field,$(step),2))
# What a step is told of itself: $(1) is how, of a name and a value.
told = $(call $(1),STEP_NAME,$(label)) $(call $(1),STEP_NEEDS,$(needs)) \
	$(call $(1),STEP_TAKES,$(filter-out nothing,$(call field,$(step),3)))
by_flag = -D$(1)='"$(2)"'
by_line = '\#define $(1) "$(2)"'
# For the emulator by -O1, unless CXXFLAGS has another -O: most of what a kernel does there is the emulator's code,
# so it runs as fast as by -O2, and compiles in two thirds of the time.
# kernel.h and what it includes are half of the compilation of most steps: precompiled. g++ takes that only if
# no macro is new before it, so a step's come after it, in a file that it reads from a pipe; and only once, so
# the next to include it gets another header of the same name.
PRECOMPILED := build/host/precompiled/common/kernel/kernel.h.gch
$(PRECOMPILED): common/kernel/kernel.h build/host/flags
	@mkdir -p $(@D)
	$(say)echo '#include_next <$<>' >$(@:.gch=) && $(subst -O2,-O1,$(HOST)) -w -x c++-header $< -o $@
build/host/%/attention.o: %/attention.cu $(PRECOMPILED)
	@mkdir -p $(@D)
	$(say)printf '%s\n' '#include <common/kernel/kernel.h>' $(call told,by_line) '#include "$<"' | \
		$(subst -O2,-O1,$(HOST:-I.=-Ibuild/host/precompiled -I.)) -MF $(@:.o=.d) -MT $@ -x c++ -c - -o $@
$(BUILD)/%/attention.o: %/attention.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(say)$(CUDA) $(call gencode,$(if $(filter $(needs),$(call field,$(step),2)),$(call field,$(step),4),$(needs))) \
		$(call told,by_flag) -c $< -o $@
