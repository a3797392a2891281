//go:build !system

package main

import (
	"context"
	"errors"
)

// inCluster needs the real Kubernetes of the tests.
func inCluster(context.Context, settings, *testbed, *sheet) error {
	return errors.New("build the bench with -tags system: this figure needs the Kubernetes of the tests")
}
