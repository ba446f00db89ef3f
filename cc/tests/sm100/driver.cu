// The checks of cc/tests/sm90/driver.cu, run on the Blackwell kernels. With tests/sm100 the program
// runs on a Hopper GPU.
#define DRIVER_CAPABILITY 100
#define DRIVER_MAX_HEAD_DIM_V 128
#define kSm90Forward kSm100Forward
#define kSm90Backward kSm100Backward
#include "cc/tests/sm90/driver.cu"
