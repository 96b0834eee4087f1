# SPDX-License-Identifier: MIT
# The exercises at the chapters' ends; the Makefile includes this.
.PHONY: exercises progress
# One object each, of half of the time: what judges, and what starts programs and compilers and needs no doctest.
EXERCISES := build/host/common/exercises/all.o
TESTING := build/host/common/testing/all.o
$(EXERCISES): $(call sources,common/exercises,%/main.cpp %/watch.cpp)
$(TESTING): $(patsubst %,common/testing/%.cpp,compiler edits instances mutants problems process)
$(EXERCISES) $(TESTING): $(TEST_HEADER).gch
$(EXERCISES) $(TESTING): private QUICK = $(HOST) $(TEST_FLAGS) -include $(TEST_HEADER)
# Behind the bar: what the reader's programs are linked with.
build/host/bin/exercises: $(EXERCISES) $(TESTING) $(call objects,common/exercises/main.cpp common/pages/values.cpp) \
		$(EMULATOR) $(REFERENCE) $(OPTIONS) | $(EMULATOR_ALONE) build/host/common/exercises/watch.o
	$(call says,$@) $(call link,$(CXX) -pthread $^)
exercises: build/host/bin/exercises
judge = @CXX="$(CXX)" WATCH="$(WATCH)" build/host/bin/exercises $@
# A rule each: pattern rules of several targets are done once for all of them.
try-%: exercises ; $(judge)
check-%: exercises ; $(judge)
answer-%: exercises ; $(judge)
progress: exercises ; $(judge)
