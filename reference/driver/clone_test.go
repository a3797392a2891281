package driver

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// sparse makes a file with data between holes, and one at its end.
func sparse(t *testing.T, size int64, at ...int64) *os.File {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "sparse"))
	check.Must(t, err)
	t.Cleanup(func() { _ = file.Close() })
	check.Must(t, file.Truncate(size))
	for i, offset := range at {
		_, err := file.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 64<<10), offset)
		check.Must(t, err)
	}
	return file
}

func blocks(t *testing.T, file *os.File) int64 {
	t.Helper()
	check.Must(t, file.Sync()) // some filesystems allocate only then
	var stat unix.Stat_t
	check.Must(t, unix.Fstat(int(file.Fd()), &stat))
	return stat.Blocks
}

func TestCopyKeepsHoles(t *testing.T) {
	const size = 64<<20 + 4096
	from, to := sparse(t, size, 1<<20, 40<<20), sparse(t, 0)
	told := int64(0)
	copied, err := copySparse(t.Context(), to, from, func(n int64) { told = n })
	check.Must(t, err)
	if copied < 128<<10 || copied > 1<<20 || told != copied {
		t.Errorf("%d bytes were copied, and %d told", copied, told)
	}
	if blocks(t, to) > 2*blocks(t, from) {
		t.Errorf("%d blocks instead of %d", blocks(t, to), blocks(t, from))
	}
	want, err := os.ReadFile(from.Name())
	check.Must(t, err)
	if got, err := os.ReadFile(to.Name()); err != nil || !bytes.Equal(got, want) {
		t.Errorf("another content in %d bytes: %v", len(got), err)
	}
}

func TestCopyEndsWithItsCaller(t *testing.T) {
	from, to := sparse(t, 64<<20, 0, 8<<20, 16<<20), sparse(t, 0)
	ctx, cancel := context.WithCancel(t.Context())
	copied, err := copySparse(ctx, to, from, func(int64) { cancel() })
	if status.Code(err) != codes.Canceled || copied > 64<<10 {
		t.Errorf("%d bytes: %v", copied, err)
	}
}

func TestSizeOfClone(t *testing.T) {
	for _, c := range []struct {
		required, limit, want int64
		code                  codes.Code
	}{
		{0, 0, 8 << 20, codes.OK},
		{8 << 20, 8 << 20, 8 << 20, codes.OK},
		{9 << 20, 0, 9 << 20, codes.OK},
		{4 << 20, 0, 0, codes.OutOfRange},
		{0, 4 << 20, 0, codes.OutOfRange},
		{2, 1, 0, codes.InvalidArgument},
	} {
		got, err := sizeOfClone(8<<20, &csi.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit})
		if got != c.want || status.Code(err) != c.code {
			t.Errorf("%d..%d: %d, %v", c.required, c.limit, got, err)
		}
	}
}

// created asks for a volume, with a source unless that is empty.
func created(t *testing.T, controller csi.ControllerClient, name string, from source) (*csi.Volume, error) {
	t.Helper()
	reply, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{mountCapability()}, VolumeContentSource: from.content(),
	})
	return reply.GetVolume(), err
}

// needsNoReflinks skips a test where nothing is copied. In CI that is a failure.
func needsNoReflinks(t *testing.T, dir string) {
	t.Helper()
	reflinks, err := hasReflinks(dir)
	check.Must(t, err)
	switch {
	case reflinks && os.Getenv("CI") == "true":
		t.Fatal("the temporary directory has reflinks: set TMPDIR to one without")
	case reflinks:
		t.Skip("the temporary directory has reflinks: nothing is copied here")
	}
}

// TestCloneThatFailsLeavesNothing: neither a record nor a part of an image.
func TestCloneThatFailsLeavesNothing(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 64 << 10 })
	needsNoReflinks(t, config.DataDir)
	controller := csi.NewControllerClient(conn)
	original, err := created(t, controller, "original", source{})
	check.Must(t, err)
	image := filepath.Join(config.DataDir, "images", fileName(original.GetVolumeId())+".img")
	check.Must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	if _, err := created(t, controller, "clone", source{Volume: original.GetVolumeId()}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("more than the limit was copied: %v", err)
	}
	for _, dir := range []string{"volumes", "images"} {
		if left, _ := os.ReadDir(filepath.Join(config.DataDir, dir)); len(left) != 1 {
			t.Errorf("left in %s: %v", dir, left)
		}
	}
}

func TestNoClonesWithoutReflinksAndLimit(t *testing.T) {
	config, conn, _ := start(t, nil)
	needsNoReflinks(t, config.DataDir)
	controller := csi.NewControllerClient(conn)
	reply, err := controller.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	check.Must(t, err)
	for _, one := range reply.GetCapabilities() {
		if one.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_CLONE_VOLUME {
			t.Error("CLONE_VOLUME is reported")
		}
	}
	if _, err := created(t, controller, "clone", source{Volume: "v"}); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
}
