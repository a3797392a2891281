// Package wire is what crust-vm's supervisor and the agent in the guest say to each
// other: wire.proto is the document, Client is the host's end, which bounds and checks
// everything that the guest says, and Serve is the guest's.
package wire

// Protocol is the version of the wire.
const Protocol = 1

// Port is the name of the virtio-serial port.
const Port = "org.crust.agent"

// SharedDir is where the guest mounts the virtio-fs that the host gives it, or below it the
// image of each container.
const SharedDir = "/run/crust/shared"

// MemoryDir is what the guest has for /dev/shm of a pod whose own is not shared with it.
const MemoryDir = "/run/crust/memory"

// The bounds of what is sent.
const (
	// MaxFrame bounds a frame of the guest's.
	MaxFrame = 256 << 10
	// MaxData bounds the data of one ReadOutput or WriteInput.
	MaxData = 128 << 10
	// maxText bounds a text for people.
	maxText = 1024
)
