// Stands in for CUDA's header of this name.
#include "emulator.h"
