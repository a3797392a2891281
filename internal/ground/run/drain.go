package run

import (
	"time"

	"google.golang.org/grpc"
)

// rollBackTime is how long calls that were cut off may take to undo what they began. A call
// that hangs in the kernel, or makes a filesystem, is not waited for any longer: what it
// leaves is the same as after a kill.
const rollBackTime = 2 * time.Second

// Drain lets the calls of a server end. If some have not ended in time, it calls cutOff and
// cancels them.
func Drain(server *grpc.Server, patience time.Duration, cutOff func()) {
	ended := make(chan struct{})
	go func() { server.GracefulStop(); close(ended) }()
	select {
	case <-ended:
		return
	case <-time.After(patience):
	}
	cutOff()
	server.Stop()
	select {
	case <-ended:
	case <-time.After(rollBackTime):
	}
}
