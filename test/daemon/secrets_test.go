//go:build system

package daemon

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestSecretsLeaveNoTrace(t *testing.T) {
	t.Parallel()
	const secret = "hunter2xyz"
	d := rig.NewDaemon(t)
	d.Extra = "log: {level: debug}"
	d.Start()
	disk := rig.Disk(t, 16*mib, "ext4")
	for _, flag := range []string{
		"password=" + secret, "credentials=/" + secret, "user=me%" + secret, "noatime,secret=" + secret, "token:" + secret,
		"x-api-key=" + secret + "\n", "encryption_passphrase=" + secret, "bearer_token=" + secret,
	} {
		_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-1", disk, "noatime", flag))
		check.That(t, err != nil && !strings.Contains(status.Convert(err).Message(), secret), "%.10s...: %v", flag, err)
	}
	// A secret where none belongs is refused without being repeated at length.
	req := d.StageRequest("pod-1", disk)
	req.MountFlags = []string{strings.Repeat("x", 2000) + secret}
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
	check.That(t, err != nil && !strings.Contains(err.Error(), secret), "a long flag: %v", err)
	metrics, node := check.Value(d.HTTP("/metrics"))(t), check.Value(d.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{}))(t)
	for name, text := range map[string]string{"log": d.Log(), "metrics": metrics, "admin": node.String()} {
		check.That(t, !strings.Contains(text, secret), "the secret is in the %s", name)
	}
	check.Must(t, filepath.WalkDir(d.Dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return sys.UnlessMissing(err) // the daemon renames files
		}
		raw, err := os.ReadFile(path)
		check.That(t, !strings.Contains(string(raw), secret), "the secret is in %s", path)
		return sys.UnlessMissing(err)
	}))
	check.That(t, strings.Contains(d.Log(), "InvalidArgument"), "the refusals are not in the log: the test shows nothing")
	d.WantClean()
}
