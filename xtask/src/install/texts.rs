//! What CMake and pkg-config read.

use super::Layout;

/// Returns the files that CMake's `find_package(pinfold)` reads. They find the library relative to
/// themselves.
pub fn cmake(layout: &Layout) -> [(&'static str, String); 2] {
    // From LIBDIR/cmake/pinfold to the prefix.
    let up = "/..".repeat(layout.libdir.split('/').count() + 2);
    // Without symbolic links: CMake may have come by /lib, a link to /usr/lib.
    let config = format!(
        r#"# The targets pinfold::pinfold, the shared library, and pinfold::static.
if(NOT TARGET pinfold::pinfold)
  include(CMakeFindDependencyMacro)
  find_dependency(Threads)
  get_filename_component(_pinfold "${{CMAKE_CURRENT_LIST_DIR}}" REALPATH)
  get_filename_component(_pinfold "${{_pinfold}}{up}" ABSOLUTE)
  add_library(pinfold::pinfold SHARED IMPORTED)
  set_target_properties(pinfold::pinfold PROPERTIES
    IMPORTED_LOCATION "${{_pinfold}}/{libdir}/libpinfold.so.0"
    IMPORTED_SONAME libpinfold.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${{_pinfold}}/include")
  add_library(pinfold::static STATIC IMPORTED)
  set_target_properties(pinfold::static PROPERTIES
    IMPORTED_LOCATION "${{_pinfold}}/{libdir}/libpinfold.a"
    INTERFACE_INCLUDE_DIRECTORIES "${{_pinfold}}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${{CMAKE_DL_LIBS}};m")
  unset(_pinfold)
endif()
"#,
        libdir = layout.libdir
    );
    // Before version 1.0, a new minor version may break programs.
    let version = format!(
        r#"set(PACKAGE_VERSION {})
string(REGEX MATCH "^[0-9]+\.[0-9]+" _pinfold_here "${{PACKAGE_VERSION}}")
string(REGEX MATCH "^[0-9]+\.[0-9]+" _pinfold_wanted "${{PACKAGE_FIND_VERSION}}")
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION OR
    NOT _pinfold_here STREQUAL _pinfold_wanted)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
"#,
        env!("CARGO_PKG_VERSION")
    );
    [
        ("pinfold-config.cmake", config),
        ("pinfold-config-version.cmake", version),
    ]
}

pub fn pkg_config(layout: &Layout) -> String {
    format!(
        "prefix={}\nlibdir=${{prefix}}/{}\nincludedir=${{prefix}}/include\n\n\
         Name: pinfold\nDescription: Memory allocation on per-CPU caches\nVersion: {}\n\
         Libs: -L${{libdir}} -lpinfold\nLibs.private: -lm -ldl -pthread\nCflags: -I${{includedir}}\n",
        layout.prefix.display(),
        layout.libdir,
        env!("CARGO_PKG_VERSION")
    )
}
