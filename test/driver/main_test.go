//go:build system

package driver_test

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }
