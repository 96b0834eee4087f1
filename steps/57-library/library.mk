# SPDX-License-Identifier: MIT
# Step 57 as a library, and what calls it; the Makefile includes this. The library is built for the
# emulator, which the tests call, and with nvcc for the GPU. (The object is the program's, too. Without
# optimisation its 60 kernels compile in a fifth of the time, and run as fast but for a tenth.)
.PHONY: libattention.so client check-flash-attn check-transformers
LIBRARY := steps/57-library
MAP = --version-script=$(LIBRARY)/exports.map
of_library = $(addprefix $(1)/$(LIBRARY)/,attention.o library.o)
of_hopper = $(addprefix $(1)/$(LIBRARY)/,hopper.o hopper_pages.o)
$(call of_library,build/host) $(call of_hopper,build/host) build/host/$(LIBRARY)/check.o: private HOST += -O0 -g0
build/host/%.o: %.cu build/host/flags
	$(call says,$<) $(call compile,$(HOST) -x c++ -c $<)
build/host/bin/libattention.so: $(call of_library,build/host) $(call of_hopper,build/host) build/host/$(LIBRARY)/check.o \
		$(EMULATOR)
	$(call says,libattention.so for the emulator) $(call link,$(CXX) -shared -pthread -Wl$(comma)$(MAP) $^)
# Steps 53 and 54, where ARCH has sm_90.
HOPPER_ARCHS := $(call archs_of,54-pages)
$(call of_hopper,$(BUILD)): $(BUILD)/%.o: %.cu $(BUILD)/flags
	$(call says,$< for $(HOPPER_ARCHS)) $(call compile,$(CUDA) $(call gencode,$(HOPPER_ARCHS)) -c $<)
$(BUILD)/bin/libattention.so: $(call of_library,$(BUILD)) $(if $(HOPPER_ARCHS),$(call of_hopper,$(BUILD))) \
		build/host/$(LIBRARY)/check.o
	$(call says,libattention.so for $(ARCH)) $(call link,$(NVCC) -shared -Xlinker $(MAP) $^)
libattention.so: $(if $(FOR_GPU),$(if $(filter step-57,$(EMULATED)),build/host,$(BUILD)),build/host)/bin/libattention.so
	@ln -sf $< $@
build/host/bin/client: $(call objects,$(LIBRARY)/client.cpp) $(REFERENCE)
	$(call says,$@) $(call link,$(CXX) -pthread $^ -ldl)
client: build/host/bin/client libattention.so
	@ln -sf $< $@
# Their tests draw from their grids; CASES="--cases 200 --seed 7" others. HOPPER=--hopper: those of FlashAttention-3.
check-flash-attn: $(call on_gpu,libattention.so)
	$(if $(wildcard $(FLASH_ATTENTION)/tests),,$(error make check-flash-attn: FLASH_ATTENTION=PATH must be a checkout \
		of github.com/Dao-AILab/flash-attention))
	@$(PYTHON) $(LIBRARY)/check_flash_attn.py $(FLASH_ATTENTION) $(HOPPER) $(CASES)
check-transformers: $(call on_gpu,libattention.so)
	@$(PYTHON) $(LIBRARY)/check_transformers.py
