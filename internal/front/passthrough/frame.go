// Package passthrough is a gRPC proxy that does not decode messages: the driver gets what the
// caller sends, and the caller what the driver answers, byte for byte. Methods that are
// answered locally are registered by name.
package passthrough

import (
	"fmt"

	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Frame is one encoded message. It holds a reference to pooled buffers until Free.
type Frame struct{ data mem.BufferSlice }

// NewFrame makes a frame of bytes. The caller must not change them afterwards.
func NewFrame(raw []byte) *Frame { return &Frame{data: mem.BufferSlice{mem.SliceBuffer(raw)}} }

// Bytes returns a copy of the message, which stays valid after Free.
func (f *Frame) Bytes() []byte { return f.data.Materialize() }

// Free releases the buffers. It may be called twice.
func (f *Frame) Free() {
	f.data.Free()
	f.data = nil
}

// codec passes frames unchanged. It has protobuf's name, because the bytes are protobuf.
type codec struct{}

// Name is part of the content type.
func (codec) Name() string { return proto.Name }

// unnamed is the codec towards drivers: it adds nothing to the content type.
type unnamed struct{ codec }

// Name is the subtype for a caller that names none.
func (unnamed) Name() string { return "" }

// Marshal returns the bytes of a frame with a reference of their own, which gRPC frees when
// they are sent.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	frame, ok := v.(*Frame)
	if !ok {
		return nil, fmt.Errorf("%T is no frame", v)
	}
	frame.data.Ref()
	return frame.data, nil
}

// Unmarshal stores the bytes in a frame, with a reference that outlives the call.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	frame, ok := v.(*Frame)
	if !ok {
		return fmt.Errorf("%T is no frame", v)
	}
	data.Ref()
	frame.data = data
	return nil
}
