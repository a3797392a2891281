package driver

import (
	"errors"
	"math"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	sizeGrain   = 4096
	defaultSize = 1 << 30
	leastSize   = 1 << 20
	mostSize    = 1 << 50
)

// readRange chooses a size in a capacity range.
func readRange(r *csi.CapacityRange) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	if required < 0 || limit < 0 || limit > 0 && required > limit {
		return 0, status.Errorf(codes.InvalidArgument, "capacity_range: %d bytes are required and %d are the limit", required, limit)
	}
	size := required
	if size == 0 {
		size = defaultSize
		if limit > 0 {
			size = min(size, limit/sizeGrain*sizeGrain)
		}
	}
	if size > mostSize {
		return 0, status.Errorf(codes.OutOfRange, "capacity_range: %d bytes are more than the %d a volume can have", size, int64(mostSize))
	}
	size = (max(size, leastSize) + sizeGrain - 1) / sizeGrain * sizeGrain
	if limit > 0 && size > limit {
		return 0, status.Errorf(codes.OutOfRange,
			"capacity_range: no multiple of %d from %d on lies within the limit of %d", sizeGrain, max(required, leastSize), limit)
	}
	return size, nil
}

func inRange(size int64, r *csi.CapacityRange) bool {
	return size >= r.GetRequiredBytes() && (r.GetLimitBytes() == 0 || size <= r.GetLimitBytes())
}

// sizeUnits are the units of sizes. "" is a suffix of every text, so it is the last.
var sizeUnits = []struct {
	suffix string
	bytes  int64
}{
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40},
	{"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}, {"", 1},
}

// parseSize parses a size such as 512Mi, 2G or 1048576.
func parseSize(text string) (int64, error) {
	for _, unit := range sizeUnits {
		digits, ok := strings.CutSuffix(text, unit.suffix)
		if !ok {
			continue
		}
		count, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || count <= 0 || count > math.MaxInt64/unit.bytes {
			break
		}
		return count * unit.bytes, nil
	}
	return 0, errors.New("give bytes, or a whole number with Ki, Mi, Gi, Ti, k, M, G or T")
}

// sizeOfClone chooses the size of a clone: that of its source, unless the request asks for
// more.
func sizeOfClone(least int64, r *csi.CapacityRange) (int64, error) {
	size := least
	if r.GetRequiredBytes() > 0 {
		var err error
		if size, err = readRange(r); err != nil {
			return 0, err
		}
	}
	if limit := r.GetLimitBytes(); size < least || limit > 0 && size > limit {
		return 0, status.Errorf(codes.OutOfRange, "capacity_range: the source has %d bytes, and a volume with its content cannot have fewer", least)
	}
	return size, nil
}
