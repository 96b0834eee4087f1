# SPDX-License-Identifier: MIT
# How tests become objects, and programs that run little (the pages', the exercises'); the Makefile includes this. All
# without optimisation, and with the headers that most of them include precompiled. (-include: each file includes what
# it needs all the same.) Each CHECK is one call: the fourth part of the compilation of a file that has many.
TEST_HEADER := build/host/precompiled/test.h
TEST_FLAGS := -O0 -g0 -DDOCTEST_CONFIG_SUPER_FAST_ASSERTS
RUN_LITTLE := $(sort $(call objects,$(wildcard common/*/*_test.cpp reference/*_test.cpp steps/*_test.cpp steps/*/*.cpp \
	common/testing/*.cpp common/exercises/*.cpp common/pages/*.cpp)))
# These test what becomes of a kernel that is optimised.
OPTIMISED_TESTS := $(addprefix build/host/common/emulator/,counters_test.o emulator_test.o)
$(TEST_HEADER).gch: build/host/flags common/testing/tests.mk
	$(call says,$(TEST_HEADER)) printf '#include <%s>\n' algorithm filesystem fstream functional map set sstream \
		string vector >$(TEST_HEADER).$$$$ && mv $(TEST_HEADER).$$$$ $(TEST_HEADER) && \
		$(call compile,$(HOST) $(TEST_FLAGS) -w -x c++-header $(TEST_HEADER))
$(RUN_LITTLE): build/host/%.o: %.cpp build/host/flags $(TEST_HEADER).gch | build/host/ladder.inc
	$(call says,$<) $(call compile,$(HOST) $(TEST_FLAGS) \
		$(if $(filter $(OPTIMISED_TESTS),$@),-O1,-include $(TEST_HEADER)) -c $<)
