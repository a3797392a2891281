package passthrough

import (
	"fmt"

	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// codec passes messages unchanged, each as a *[]byte. It has protobuf's name, because the bytes are protobuf.
type codec struct{}

// Name is part of the content type.
func (codec) Name() string { return proto.Name }

// unnamed is the codec towards drivers: it adds nothing to the content type.
type unnamed struct{ codec }

// Name is the subtype for a caller that names none.
func (unnamed) Name() string { return "" }

// Marshal returns the bytes of a message. They must not change afterwards.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	raw, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("%T is no message of bytes", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(*raw)}, nil
}

// Unmarshal copies the bytes, because gRPC reuses its buffers.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	raw, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("%T is no message of bytes", v)
	}
	*raw = data.Materialize()
	return nil
}
