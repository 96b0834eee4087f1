# SPDX-License-Identifier: MIT
# The exercises at the chapters' ends; the Makefile includes this.
.PHONY: exercises progress
EXERCISES := $(call sources,common/exercises,%/main.cpp %/watch.cpp)
# Behind the bar: what the reader's programs are linked with.
build/host/bin/exercises: $(call objects,$(EXERCISES) common/exercises/main.cpp common/pages/values.cpp \
		common/testing/compiler.cpp common/testing/edits.cpp common/testing/process.cpp) $(EMULATOR) $(REFERENCE) $(OPTIONS) \
		| $(EMULATOR_ALONE) build/host/common/exercises/watch.o
	$(call says,$@) $(call link,$(CXX) -pthread $^)
exercises: build/host/bin/exercises
judge = @CXX="$(CXX)" WATCH="$(WATCH)" build/host/bin/exercises $@
# A rule each: pattern rules of several targets are done once for all of them.
try-%: exercises ; $(judge)
check-%: exercises ; $(judge)
answer-%: exercises ; $(judge)
progress: exercises ; $(judge)
