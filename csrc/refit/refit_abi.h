// The C interface of libtandem_refit.so, for rl/weights/native.py. Every function returns 0 or
// fills `error` and returns its code; objects are opaque and freed by their own function. Strings
// are UTF-8.
#pragma once

#include <stdint.h>

extern "C" {

struct TandemRefitError {
  int32_t code;  // tandem::StatusCode
  int32_t rank;  // tandem::Fault
  int64_t bucket;
  char message[488];
};

struct TandemRefitTimes {
  double copy;
  double digest;
  double wire;
  double total;
};

// What opens a link; fields that a transport does not know are ignored.
struct TandemRefitLink {
  int32_t transport;  // 0 shm, 1 tcp, 2 nccl
  int32_t num_slots;
  int32_t num_readers;
  int32_t reader;  // receivers
  int32_t root;    // senders
  int32_t has_digests;
  const char* const* addresses;  // senders: [1], segment name | host; receivers: [num_roots]
  int32_t port;                  // tcp senders; 0 = any
  double silence_s;              // tcp
  const char* nccl_library;
  const char* device_library;
  const char* unique_ids;  // [num_roots x 128] bytes
  int32_t nccl_dialect;
  int32_t device;
};

int32_t tandem_refit_abi_version();

// names [n], types [n] (tandem::WireType), ranks [n] (numbers of extents), extents: all shapes in a
// row.
int32_t tandem_plan_build(const char* const* names, const int32_t* types, const int32_t* ranks,
                          const int64_t* extents, int64_t n, int64_t bucket_bytes,
                          int32_t num_roots, void** plan, TandemRefitError* error);
int32_t tandem_plan_parse(const char* bytes, int64_t size, void** plan, TandemRefitError* error);
void tandem_plan_free(void* plan);
int64_t tandem_plan_serialize(const void* plan, char* bytes, int64_t capacity);  // returns the size
uint64_t tandem_plan_digest(const void* plan);
// counts: tensors, buckets, pieces, bucket_bytes, total_bytes, num_roots
void tandem_plan_counts(const void* plan, int64_t counts[6]);
// pieces [num_pieces, 6]: bucket, tensor, tensor_offset, bucket_offset, bytes, root
void tandem_plan_pieces(const void* plan, int64_t* pieces);
// Name of tensor `index`, with its type and shape; all live as long as the plan.
const char* tandem_plan_tensor(const void* plan, int64_t index, int32_t* type, int32_t* num_extents,
                               const int64_t** extents);

int32_t tandem_sender_open(const void* plan, const TandemRefitLink* link, void** sender,
                           TandemRefitError* error);
int64_t tandem_sender_address(const void* sender, char* bytes, int64_t capacity);
int32_t tandem_sender_join(void* sender, double timeout_s, TandemRefitError* error);
int32_t tandem_sender_begin(void* sender, uint64_t epoch, uint64_t version, double timeout_s,
                            TandemRefitError* error);
// data, types: one per piece of bucket `first`, then of the following buckets of this root, `count`
// buckets in all.
int32_t tandem_sender_send(void* sender, int64_t first, int64_t count, void* const* data,
                           const int32_t* types, TandemRefitError* error);
int32_t tandem_sender_finish(void* sender, uint64_t* digests, TandemRefitTimes* times,
                             TandemRefitError* error);
void tandem_sender_abort(void* sender, const TandemRefitError* fault);
void tandem_sender_free(void* sender);

int32_t tandem_receiver_open(const void* plan, const TandemRefitLink* link, void** receiver,
                             TandemRefitError* error);
int32_t tandem_receiver_join(void* receiver, double timeout_s, TandemRefitError* error);
int32_t tandem_receiver_begin(void* receiver, uint64_t epoch, uint64_t version, double timeout_s,
                              TandemRefitError* error);
int32_t tandem_receiver_receive(void* receiver, int64_t first, int64_t count, void* const* data,
                                const int32_t* types, TandemRefitError* error);
int32_t tandem_receiver_finish(void* receiver, uint64_t* digests, TandemRefitTimes* times,
                               TandemRefitError* error);
void tandem_receiver_abort(void* receiver, const TandemRefitError* fault);
void tandem_receiver_free(void* receiver);

// Digests of whole host tensors [n].
void tandem_digest(const void* const* data, const int64_t* bytes, int64_t n, uint64_t* digests);
// 128 bytes into unique_id.
int32_t tandem_nccl_unique_id(const char* library, char* unique_id, TandemRefitError* error);

}  // extern "C"
