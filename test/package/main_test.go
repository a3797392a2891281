//go:build system

package package_test

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }
