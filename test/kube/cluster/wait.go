//go:build system

package cluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
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

// copyBody reads an answer that must be a good one.
func copyBody(to io.Writer, reply *http.Response) error {
	if _, err := io.Copy(to, reply.Body); err != nil {
		return err
	}
	if reply.StatusCode != http.StatusOK {
		return fmt.Errorf("the answer is %s", reply.Status)
	}
	return nil
}
