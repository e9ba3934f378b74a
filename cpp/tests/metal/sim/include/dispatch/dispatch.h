#pragma once
#include <stddef.h>
typedef struct dispatch_queue_s* dispatch_queue_t;
typedef void* dispatch_data_t;
typedef void (^dispatch_block_t)(void);
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT ((dispatch_block_t)0)
#ifdef __cplusplus
extern "C" {
#endif
dispatch_data_t dispatch_data_create(const void* bytes, size_t size, dispatch_queue_t queue,
                                     dispatch_block_t destructor);
void dispatch_release(void* object);
#ifdef __cplusplus
}
#endif
