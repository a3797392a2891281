package backupcli

import (
	"bytes"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a place to run crust-backup.
type bench struct {
	t      *testing.T
	socket string // of a driver
	env    map[string]string
	tty    bool
	width  int
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dir := check.ShortDir(t)
	return &bench{t: t, socket: filepath.Join(dir, "csi.sock"), env: map[string]string{}, width: 80}
}

type result struct {
	code     int
	out, err string
}

func (b *bench) run(args ...string) result {
	b.t.Helper()
	var out, errs bytes.Buffer
	code := Run(b.t.Context(), args, Env{
		Out: &out, Err: &errs, Terminal: b.tty, Width: b.width, Getenv: func(k string) string { return b.env[k] },
	})
	return result{code, out.String(), errs.String()}
}
