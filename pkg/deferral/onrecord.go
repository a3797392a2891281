package deferral

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// OnRecord reads which volumes a state directory has on record, of this boot,
// and changes nothing: the daemon may be running or not. Those on their way out
// are among them. An error says that the list is not whole, for a record cannot be
// read: whoever asks has to take it for a volume that lives.
func OnRecord(stateDir string) ([]*volume.Volume, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	var out []*volume.Volume
	var problems []error
	for _, part := range []string{volumesDir, removingDir} {
		dir := filepath.Join(stateDir, part)
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, volume.Errorf(volume.Internal, "the records cannot be read: %w", err))
		}
		for _, entry := range entries {
			rec, err := readRecord(filepath.Join(dir, entry.Name()))
			switch {
			case errors.Is(err, fs.ErrNotExist): // it went meanwhile
			case err != nil:
				problems = append(problems, fmt.Errorf("the record %s cannot be read: %w", filepath.Join(dir, entry.Name()), err))
			case rec.Boot == boot:
				out = append(out, &rec.Volume)
			}
		}
	}
	slices.SortFunc(out, func(x, y *volume.Volume) int { return strings.Compare(x.Target, y.Target) })
	return out, errors.Join(problems...)
}
