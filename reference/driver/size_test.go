package driver

import (
	"math"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestReadRange(t *testing.T) {
	for _, c := range []struct {
		required, limit, want int64
		code                  codes.Code
	}{
		{0, 0, defaultSize, codes.OK},
		{0, 64 << 20, 64 << 20, codes.OK},
		{5 << 20, 0, 5 << 20, codes.OK},
		{5<<20 + 1, 0, 5<<20 + 4096, codes.OK},
		{1, 0, leastSize, codes.OK},
		{5<<20 + 1, 5<<20 + 2, 0, codes.OutOfRange},
		{0, 100, 0, codes.OutOfRange},
		{2, 1, 0, codes.InvalidArgument},
		{-1, 0, 0, codes.InvalidArgument},
		{0, -1, 0, codes.InvalidArgument},
		{math.MaxInt64, 0, 0, codes.OutOfRange},
	} {
		got, err := readRange(&csi.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit})
		if got != c.want || status.Code(err) != c.code {
			t.Errorf("%d..%d: %d, %v", c.required, c.limit, got, err)
		}
	}
}

// TestEphemeralSize: a pod's author chooses the text.
func TestEphemeralSize(t *testing.T) {
	for text, want := range map[string]int64{"": defaultSize, "1": leastSize, "5000001": 5001216, "1024Ti": mostSize, "1025Ti": 0, "9223372036854775807": 0} {
		p := &publishing{id: "v", attributes: map[string]string{sizeKey: text}}
		got, err := p.ephemeralSize()
		if got != want || want == 0 && status.Code(err) != codes.OutOfRange {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "4096": 4096, "1Ki": 1024, "512Mi": 512 << 20, "2Gi": 2 << 30, "1Ti": 1 << 40, "3k": 3000, "5M": 5e6, "2G": 2e9, "1T": 1e12,
	} {
		if got, err := parseSize(text); got != want || err != nil {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "Gi", "-1", "0", "1.5Gi", "1 Gi", "1gi", "9223372036854775807Ki", "9999999999999999999", "0x10"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}
