/* What torch asks of the CUDA runtime and driver while it traces for a GPU: the answers of an H200. Nothing computes. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

#define ANSWER(call, action) cudaError_t call { action; return cudaSuccess; }

ANSWER(cudaGetDeviceCount(int *count), *count = 1)
ANSWER(cudaGetDevice(int *device), *device = 0)
ANSWER(cudaSetDevice(int device), )
ANSWER(cudaInitDevice(int device, unsigned flags, unsigned more), )
ANSWER(cudaGetLastError(void), )
ANSWER(cudaPeekAtLastError(void), )
ANSWER(cudaRuntimeGetVersion(int *version), *version = CUDART_VERSION)
ANSWER(cudaDriverGetVersion(int *version), *version = CUDART_VERSION)
ANSWER(cudaDeviceGetStreamPriorityRange(int *least, int *greatest), *least = 0; *greatest = -5)
ANSWER(cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status), *status = 0)
ANSWER(cudaMemGetInfo(size_t *unused, size_t *total), *unused = *total = 141ul << 30)
ANSWER(cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device),
       *value = name == cudaDevAttrComputeCapabilityMajor ? 9 : 0)

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of_it, int device) {
    memset(of_it, 0, sizeof *of_it);
    strcpy(of_it->name, "NVIDIA H200");
    of_it->major = 9;
    of_it->totalGlobalMem = 141ul << 30;
    of_it->multiProcessorCount = 132;
    of_it->warpSize = 32;
    of_it->maxThreadsPerBlock = 1024;
    of_it->maxThreadsPerMultiProcessor = 2048;
    of_it->regsPerMultiprocessor = 65536;
    of_it->sharedMemPerBlock = 48 << 10;
    of_it->sharedMemPerBlockOptin = 227 << 10;
    of_it->sharedMemPerMultiprocessor = 228 << 10;
    of_it->l2CacheSize = 60 << 20;
    return cudaSuccess;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = *active = 0;
    return CUDA_SUCCESS;
}
