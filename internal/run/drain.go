package run

import (
	"time"

	"google.golang.org/grpc"
)

// rollBackTime is what calls that were cut off have to undo what they began. One that
// hangs in the kernel, or makes a filesystem, is not waited for any longer: what is left
// of it is as after a kill.
const rollBackTime = 2 * time.Second

// Drain lets the calls of a server end, and cuts off those that have not ended in time,
// of which it tells cutOff.
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
