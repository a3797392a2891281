//go:build system

package cluster

import (
	"context"
	"fmt"
	"time"
)

// Patience is how long things may take that a cluster does by itself. It is far
// more than they do take: kubelet's pauses after errors grow to two minutes.
const Patience = 3 * time.Minute

// eventually asks again and again until there is no error.
func eventually(what string, try func(context.Context) error) error {
	for deadline := time.Now().Add(Patience); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), callTime)
		err := try(ctx)
		cancel()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not within %v: %w", what, Patience, err)
		}
	}
}
