// Package passthrough is a gRPC proxy that looks at no message: what a caller
// sends reaches the driver byte for byte, and what the driver answers the caller.
// Methods that are answered here instead are given to it by name.
package passthrough

import (
	"fmt"

	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Frame is one message as it came. It holds a reference to pooled buffers, and
// ends with Free.
type Frame struct{ data mem.BufferSlice }

// NewFrame makes a frame of bytes, which must not be changed afterwards.
func NewFrame(raw []byte) *Frame { return &Frame{data: mem.BufferSlice{mem.SliceBuffer(raw)}} }

// Bytes is a copy of the message, which outlives the frame.
func (f *Frame) Bytes() []byte { return f.data.Materialize() }

// Free gives the buffers back. It may be called twice.
func (f *Frame) Free() {
	f.data.Free()
	f.data = nil
}

// codec moves frames as they are. It goes by protobuf's name, for that is what the bytes are.
type codec struct{}

// Name is part of the content type.
func (codec) Name() string { return proto.Name }

// unnamed is the codec towards drivers: it adds nothing to the content type.
type unnamed struct{ codec }

// Name is the subtype for a caller that names none.
func (unnamed) Name() string { return "" }

// Marshal gives the bytes of a frame to gRPC, which frees its reference when they
// are sent.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	frame, ok := v.(*Frame)
	if !ok {
		return nil, fmt.Errorf("%T is no frame", v)
	}
	frame.data.Ref()
	return frame.data, nil
}

// Unmarshal keeps the bytes of a frame beyond the call.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	frame, ok := v.(*Frame)
	if !ok {
		return fmt.Errorf("%T is no frame", v)
	}
	data.Ref()
	frame.data = data
	return nil
}
