// Package wire is the protocol between crust-vm's supervisor and the agent in the guest. wire.proto is its document.
// Client is the host's side, which bounds and checks everything that the guest sends; Serve is the guest's.
package wire

// Protocol is the version of the protocol.
const Protocol = 1

// Port is the name of the virtio-serial port.
const Port = "org.crust.agent"

// SharedDir is where the guest mounts the host's virtio-fs.
const SharedDir = "/run/crust/shared"

// The bounds of messages.
const (
	// MaxFrame bounds a frame that the guest sends.
	MaxFrame = 256 << 10
	// MaxData bounds the data of one ReadOutput or WriteInput.
	MaxData = 128 << 10
	// maxText bounds a text for people.
	maxText = 1024
)
