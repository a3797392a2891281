package capture_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func say(t *testing.T, script string) (string, bool) {
	t.Helper()
	file := check.Value(capture.New(1000))(t)
	defer func() { _ = file.Close() }()
	cmd := exec.Command("sh", "-c", script)
	cmd.Stdout = file
	_ = cmd.Run() // a program that was refused room may well fail
	said, full, err := capture.Text(file)
	check.Must(t, err)
	return said, full
}

func TestText(t *testing.T) {
	said, full := say(t, "echo one; echo two")
	check.That(t, said == "one\ntwo\n" && !full, "%q, %v", said, full)
	said, full = say(t, "true")
	check.That(t, said == "" && !full, "%q, %v", said, full)
	said, full = say(t, "i=0; while [ $i -lt 2000 ]; do printf 0123456789 || exit; i=$((i+1)); done")
	check.That(t, full && len(said) == 1000 && strings.HasPrefix(said, "0123456789012"), "%d bytes, %v", len(said), full)
}
