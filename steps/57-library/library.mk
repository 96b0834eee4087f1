# SPDX-License-Identifier: MIT
# Step 57 as a library, and what calls it; the Makefile includes this. The library is built for the
# emulator, which the tests call, and with nvcc for the GPU. (The object is the program's, too.)
.PHONY: libattention.so client train check-flash-attn check-transformers \
	train-quoted training bench-training
LIBRARY := steps/57-library
MAP = --version-script=$(LIBRARY)/exports.map
of_library = $(addprefix $(1)/$(LIBRARY)/,attention.o library.o gradients.o)
of_hopper = $(addprefix $(1)/$(LIBRARY)/,hopper.o hopper_pages.o hopper_dims.o hopper_gradients.o \
	hopper_wide.o)
build/host/%.o: %.cu build/host/flags
	$(call says,$<) $(call compile,$(quickly) -x c++ -c $<)
build/host/bin/libattention.so: $(call of_library,build/host) $(call of_hopper,build/host) build/host/$(LIBRARY)/check.o \
		$(EMULATOR)
	$(call says,libattention.so for the emulator) $(call link,$(CXX) -shared -pthread -Wl$(comma)$(MAP) $^)
# Steps 53, 54, 56, 92 and 87, where ARCH has sm_90.
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
build/host/bin/train: $(call objects,steps/69-training/train.cpp) $(REFERENCE)
	$(call says,$@) $(call link,$(CXX) -pthread $^ -ldl)
# Chapter 69 quotes it with the emulator's library, whatever GPU is here.
train-quoted: build/host/bin/train build/host/bin/libattention.so
	@ln -sf $< train
client train: %: build/host/bin/% libattention.so
	@ln -sf $< $@
# Their tests draw from their grids; CASES="--cases 200 --seed 7" others. HOPPER=--hopper: those of FlashAttention-3.
check-flash-attn: $(call on_gpu,libattention.so)
	$(if $(wildcard $(FLASH_ATTENTION)/tests),,$(error make check-flash-attn: FLASH_ATTENTION=PATH must be a checkout \
		of github.com/Dao-AILab/flash-attention))
	@$(PYTHON) $(LIBRARY)/check_flash_attn.py $(FLASH_ATTENTION) $(HOPPER) $(CASES)
# Step 69's curves: of ./train on the emulator, and of a GPT on this GPU.
training: train
	@for type in bf16 fp16; do ./train --steps 100 --type $$type --csv plots/results/emulator-training-$$type.csv || exit 1; done
bench-training: $(call on_gpu,libattention.so)
	@$(PYTHON) steps/69-training/train.py $(if $(GPU),--csv plots/results/$(GPU)-training.csv)
check-transformers: $(call on_gpu,libattention.so)
	@$(PYTHON) $(LIBRARY)/check_transformers.py
